"""`CapturedState` and `CapturedStateProducer`: staging a key again gives its own contents at captured addresses."""

import dataclasses
import gc
import weakref

import pytest
import torch

from bateleur.cudagraph.captured_state import CapturedStateProducer
from bateleur.cudagraph.errors import AddressMoved, CaptureError, KeyMismatch, NotCaptured, StaleState
from bateleur.cudagraph.manager import CudaGraphManager
from bateleur.cudagraph.replay_checks import ReplayChecks
from bateleur.cudagraph.staging import Phase, StagedBatch

SIZES = (8, 4, 2, 1)


def own_schedule(num):
    """Contents of the schedule buffer after `num` requests were staged."""
    return [num, *range(num)]


class Draft:
    """A body that reads the target's schedule, and keeps the output of each call."""

    def __init__(self):
        self.calls = {}

    def __call__(self, x):
        out = x.state.schedule * 10 + x.state.tokens.sum()
        self.calls.setdefault(x.key.num_tokens, []).append(out)
        return out

    def warmup_schedule(self, num):
        return (self.calls[num][0] // 10).tolist()


def capture_draft(kit, producer_of=CapturedStateProducer, **options):
    """Capture a target for 8, 4, 2 and 1 tokens over one set of buffers, and a draft over its captured states."""
    toy, draft = kit.Toy(), Draft()
    target = kit.manager(**options)
    states = target.capture(toy, toy.body)
    drafter = kit.manager(**options)
    drafter.capture(producer_of(states), draft)
    return toy, target, drafter, draft


def test_each_draft_graph_reads_the_contents_of_its_own_key(kit):
    toy, target, drafter, draft = capture_draft(kit)
    assert [key.num_tokens for key in target.states] == list(SIZES)
    for num in SIZES:
        assert draft.warmup_schedule(num) == own_schedule(num)
    for num in (8, 2, 4, 1, 8):
        before = toy.generation
        staged = toy.step(kit.full(num), [3] * num, list(range(1, num + 1)))
        assert target.replay(kit.full(num), staged)["batch"].item() == num
        result = drafter.replay(kit.full(num), staged)
        assert result.tolist() == [10 * n + 3 * num for n in own_schedule(num)]
        assert toy.generation == before + 1, "one staging serves both managers"


def test_without_staging_again_the_draft_reads_the_last_captured_key(kit):
    """The captured state itself has the right addresses, but the contents of the smallest key, staged last."""

    class Kept(CapturedStateProducer):
        def stage(self, key, phase):
            state = dataclasses.replace(self._states[key].staged.state)
            return StagedBatch(key, state, self.generation)

    toy, target, _, draft = capture_draft(kit, Kept)
    for num in SIZES:
        kept = target.states[kit.full(num)].staged.state.schedule
        assert kept.data_ptr() == toy.buffers["schedule"].data_ptr()
        assert draft.warmup_schedule(num) == [1, *[0] * num]
    assert draft.warmup_schedule(8) != own_schedule(8)


def test_a_stale_batch_is_refused_and_wrong_without_checks(kit):
    for checks in (ReplayChecks.CHEAP, ReplayChecks.OFF):
        toy, _, drafter, _ = capture_draft(kit, checks=checks)
        first = toy.step(kit.full(8), [2] * 8, [1] * 8)
        toy.step(kit.full(2), [1] * 2, [1] * 2)
        if checks is ReplayChecks.OFF:
            assert drafter.replay(kit.full(8), first)[0].item() == 10 * 2 + 2, "another batch's contents"
            continue
        with pytest.raises(StaleState, match=r"FULL 8 tokens.*generation 17, but the producer is at 18"):
            drafter.replay(kit.full(8), first)


def test_current_state_raises_after_another_staging(kit):
    toy = kit.Toy()
    states = kit.manager().capture(toy, toy.body)
    assert states[kit.full(1)].current_state().schedule.tolist() == own_schedule(1)
    with pytest.raises(StaleState, match="FULL 8 tokens, 8 requests, 1 each: staged at generation 2"):
        states[kit.full(8)].current_state()
    restaged = states[kit.full(8)].restage(Phase.RUN)
    assert restaged.state.schedule.tolist() == own_schedule(8)
    assert restaged.state is not states[kit.full(8)].staged.state
    assert (restaged.key, restaged.generation) == (kit.full(8), toy.generation)
    with pytest.raises(StaleState):
        states[kit.full(1)].current_state()


def test_restage_raises_if_a_buffer_moved(kit):
    toy = kit.Toy()
    states = kit.manager().capture(toy, toy.body)
    before, toy.buffers["schedule"] = toy.generation, toy.cache.new_zeros(40, dtype=torch.int64)
    with pytest.raises(AddressMoved, match=r"FULL 4 tokens.*buffer schedule was captured at 0x.* and is at 0x"):
        states[kit.full(4)].restage(Phase.WARMUP)
    assert toy.generation == before, "nothing was staged"
    toy.buffers["schedule2"] = toy.buffers.pop("schedule")
    toy.step = lambda key, *rest, **more: StagedBatch(key, None, toy.generation)
    with pytest.raises(AddressMoved, match=r"schedule was captured at 0x.* and is gone"):
        states[kit.full(4)].restage(Phase.WARMUP)


def test_a_producer_that_stages_another_key_or_reports_another_generation_is_refused(cpu):
    toy = cpu.Toy()
    states = cpu.manager().capture(toy, toy.body)
    toy.stage = lambda key, phase: StagedBatch(cpu.full(2), None, toy.generation)
    with pytest.raises(KeyMismatch, match=r"FULL 4 tokens.*staged for FULL 2 tokens"):
        states[cpu.full(4)].restage(Phase.RUN)
    toy.stage = lambda key, phase: StagedBatch(key, None, 3)
    with pytest.raises(StaleState, match="generation 3"):
        states[cpu.full(4)].restage(Phase.RUN)


def test_a_missing_key_names_its_neighbours_and_what_differs(cpu):
    toy = cpu.Toy()
    manager = cpu.manager()
    states = manager.capture(toy, toy.body, keys=[cpu.full(8), cpu.full(2)])
    assert list(states) == [cpu.full(8), cpu.full(2)]
    assert (len(states), cpu.full(8) in states, cpu.full(4) in states) == (2, True, False)
    assert states.get(cpu.full(4)) is None
    with pytest.raises(NotCaptured) as error:
        states[cpu.full(4)]
    assert isinstance(error.value, KeyError)
    assert str(error.value) == (
        "no graph for FULL 4 tokens, 4 requests, 1 each: it is not captured yet; nearest: "
        "FULL 2 tokens, 2 requests, 1 each (num_tokens 2 instead of 4, num_reqs 2 instead of 4); "
        "FULL 8 tokens, 8 requests, 1 each (num_tokens 8 instead of 4, num_reqs 8 instead of 4)"
    )
    with pytest.raises(NotCaptured, match=r"PIECEWISE 8 tokens: it is not in the dispatcher; nearest: FULL 2 tokens"):
        states[cpu.pieces(8)]
    varied = dataclasses.replace(cpu.full(2), variant=("lora", 1))
    with pytest.raises(NotCaptured, match=r"each \(variant \(\) instead of \('lora', 1\)\); FULL 8"):
        states[varied]
    with pytest.raises(NotCaptured, match="BatchExecutionDescriptor"):
        states[8]
    manager.release([cpu.full(2)], reason="weights were reloaded")
    with pytest.raises(NotCaptured, match=r"FULL 2.*it was released: weights were reloaded; nearest: FULL 8"):
        states[cpu.full(2)]
    manager.release(reason="asleep")
    with pytest.raises(NotCaptured, match="nothing is captured"):
        states[cpu.full(8)]


def test_a_captured_state_producer_checks_its_keys_when_it_is_made(cpu):
    toy = cpu.Toy()
    manager = cpu.manager()
    states = manager.capture(toy, toy.body, keys=[cpu.full(8), cpu.full(2)])
    with pytest.raises(NotCaptured, match="no graph for FULL 4"):
        CapturedStateProducer(states, [cpu.full(8), cpu.full(4)])
    with pytest.raises(ValueError, match="must have at least one captured key"):
        CapturedStateProducer(states, [])
    producer = CapturedStateProducer(states, [cpu.full(2)])
    assert producer.addresses() == toy.addresses()
    toy.step(cpu.full(2), [1], [1])
    assert producer.generation == toy.generation
    manager.release([cpu.full(2)], reason="asleep")
    with pytest.raises(CaptureError, match="it was released: asleep") as error:
        CudaGraphManager(cpu.dispatcher(), cpu.Backend()).capture(producer, toy.body, keys=[cpu.full(2)])
    assert isinstance(error.value.__cause__, NotCaptured)


def test_a_captured_state_producer_poisons_the_buffers_of_the_target(kit):
    toy = kit.Toy()
    producer = CapturedStateProducer(kit.manager().capture(toy, toy.body))
    producer.poison()
    assert torch.isnan(toy.buffers["window"]).all()

    class NotPoisonable:
        stage, addresses, generation = toy.stage, toy.addresses, property(lambda self: toy.generation)

    CapturedStateProducer(kit.manager().capture(NotPoisonable(), toy.body)).poison()
    assert torch.isfinite(toy.buffers["window"]).all()


def test_captured_states_of_two_producers_are_refused(cpu):
    toy, other = cpu.Toy(), cpu.Toy()
    manager = cpu.manager()
    manager.capture(toy, toy.body, keys=[cpu.full(8)])
    states = manager.capture(other, other.body)
    assert states[cpu.full(8)].producer is toy
    assert states[cpu.full(4)].producer is other
    with pytest.raises(ValueError, match=r"FULL 4 tokens.* and FULL 8 tokens.*must have the same producer"):
        CapturedStateProducer(states)


def test_the_captured_state_keeps_its_producer_alive(kit):
    toy = kit.Toy()
    manager = kit.manager(checks=ReplayChecks.ADDRESSES)
    states = manager.capture(toy, toy.body, keys=[kit.full(4)])
    alive = weakref.ref(toy)
    del toy, manager
    gc.collect()
    restaged = states[kit.full(4)].restage(Phase.RUN)
    assert restaged.state.schedule.tolist() == own_schedule(4)
    assert alive() is not None
    del states, restaged
    gc.collect()
    assert alive() is None


def test_undeclared_externals_are_named(kit):
    toy = kit.Toy()
    hidden, nothing = toy.weight.new_ones(3), toy.weight.new_ones(0)

    def body(x):
        return toy.body(x)["hidden"] * torch.cat([nothing, hidden])

    state = kit.manager().capture(toy, body, keys=[kit.full(4)])[kit.full(4)]
    assert state.undeclared([toy.weight, toy.cache, hidden]) == ()
    (odd,) = state.undeclared([toy.weight[2:], toy.cache])
    assert (odd.address, odd.shape) == (hidden.data_ptr(), (3,))
    assert len(state.undeclared([])) == 3
    assert len(state.externals) == 8, "four declared buffers, three tensors and an empty one"


def test_a_tensor_made_while_staging_is_undeclared(kit):
    """The state keeps it alive, and no later step writes it."""

    class Fresh(kit.Toy):
        def stage(self, key, phase):
            staged = super().stage(key, phase)
            staged.state.window = staged.state.window.clone()
            return staged

    toy = Fresh()
    state = kit.manager().capture(toy, toy.body, keys=[kit.full(4)])[kit.full(4)]
    (odd,) = state.undeclared([toy.weight, toy.cache])
    assert odd.address == state.staged.state.window.data_ptr()
