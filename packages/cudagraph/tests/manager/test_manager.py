"""`CudaGraphManager`: capture, capture of pending keys, release, and the state after a failure."""

import contextlib
import gc

import pytest
import torch

from bateleur.cudagraph import manager as manager_module
from bateleur.cudagraph.errors import CaptureError, GraphError, HostSync, NotCaptured, SharedState
from bateleur.cudagraph.execution import Execution
from bateleur.cudagraph.manager import CudaGraphManager
from bateleur.cudagraph.replay_checks import ReplayChecks
from bateleur.cudagraph.staging import Phase, StagedBatch


def fail_at(body, *sizes, error=ZeroDivisionError, capturing=True):
    """Return a body that raises at some sizes, in the capture or in the warm-up."""
    calls = []

    def failing(x):
        calls.append(x.key)
        if x.key is not None and x.key.num_tokens in sizes and calls.count(x.key) == 1 + capturing:
            raise error("by zero")
        return body(x)

    return failing


def test_keys_are_captured_in_order_after_a_warm_up_each(cpu):
    toy = cpu.Toy()
    manager = cpu.manager()
    assert (manager.producer, set(manager.ready), manager.pending) == (None, set(), manager.dispatcher.keys)
    states = manager.capture(toy, toy.body, keys=[cpu.full(1), cpu.full(8)])
    assert toy.phases == [(n, phase) for n in (8, 1) for phase in (Phase.WARMUP, Phase.CAPTURE)]
    assert manager.capture(toy, toy.body) is states
    assert [n for n, phase in toy.phases if phase is Phase.CAPTURE] == [8, 1, 4, 2]
    assert states is manager.states
    assert (manager.producer, set(manager.ready), manager.pending) == (toy, set(manager.dispatcher.keys), ())
    assert all(states[key].key == key for key in manager.dispatcher.keys)
    assert states[cpu.full(4)].addresses == toy.addresses()
    assert states[cpu.full(4)].staged.signature == cpu.Bound(cpu.WINDOW)


def test_capture_stages_and_does_not_execute(cpu):
    toy = cpu.Toy()
    runs = []

    def body(x):
        out = toy.body(x)
        runs.append(out["hidden"])
        return out

    toy.cache.fill_(2.0)
    before = toy.cache.clone()
    cpu.manager().capture(toy, body, keys=[cpu.full(4)])
    warmed, captured = runs
    assert torch.isfinite(warmed).all()
    assert torch.isnan(captured).all(), "undefined until a replay"
    assert torch.equal(toy.cache[1:], before[1:])
    expected = toy.stage(cpu.full(4), Phase.RUN).state
    assert toy.buffers["tokens"][:4].tolist() == expected.tokens.tolist()


def test_a_value_that_the_warm_up_caches_in_a_shared_state_is_refused(kit):
    """A plan that a metadata builder computes in the warm-up would not be in the graph (vLLM #42444)."""

    class Lazy:
        plan = None

    class Producer(kit.Toy):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.keep = shared, Lazy()

        def stage(self, key, phase):
            staged = super().stage(key, phase)
            meta = self.keep if self.shared else Lazy()
            return StagedBatch(key, {"lens": staged.state.window, "layers": [meta]}, self.generation)

    def body(x):
        (meta,) = x.state["layers"]
        if meta.plan is None:
            meta.plan = x.state["lens"] * 100
        return meta.plan + 1

    manager = kit.manager()
    with pytest.raises(SharedState, match=r"FULL 4 tokens.*: state\['layers'\]\[0\] is the same object"):
        manager.capture(Producer(True), body, keys=[kit.full(4)])
    fresh = Producer(False)
    manager.capture(fresh, body, keys=[kit.full(4)])
    fresh.stage(kit.full(4), Phase.RUN)
    fresh.buffers["window"].fill_(5.0)
    staged = StagedBatch(kit.full(4), None, fresh.generation)
    out = manager.replay(kit.full(4), staged)
    assert out.shape == (4, kit.WINDOW)
    assert (out == 501).all()


def test_a_shared_dict_in_a_plain_object_that_the_warm_up_fills_is_found(cpu):
    class Plans:
        def __init__(self):
            self.cache = {}

    class Producer(cpu.Toy):
        plans = Plans()

        def stage(self, key, phase):
            staged = super().stage(key, phase)
            return StagedBatch(key, (staged.state, self.plans), self.generation, staged.signature)

    def body(x):
        state, plans = x.state
        return plans.cache.setdefault("plan", state.window * 100) + 1

    with pytest.raises(SharedState, match=r"FULL 4 tokens.*: state\[1\].cache is the same object"):
        cpu.manager().capture(Producer(), body, keys=[cpu.full(4)])


def test_the_same_state_object_is_refused_and_shared_constants_are_not(cpu):
    class Producer(cpu.Toy):
        kept = None
        constants = ("a", [1, 2], {"b": object()})

        def stage(self, key, phase):
            staged = super().stage(key, phase)
            self.kept = staged.state if self.kept is None else self.kept
            return staged if same is None else StagedBatch(key, same(self, staged), self.generation, staged.signature)

    manager = cpu.manager()
    same = None
    manager.capture(Producer(), lambda x: x.state.tokens + 1, keys=[cpu.full(4)])
    same = lambda self, staged: self.kept  # noqa: E731
    with pytest.raises(SharedState, match="state is the same object in warm-up and capture"):
        manager.capture(Producer(), lambda x: x.state.tokens + 1, keys=[cpu.full(2)])
    same = lambda self, staged: (staged.state, self.constants)  # noqa: E731
    manager.capture(Producer(), lambda x: x.state[0].tokens + 1, keys=[cpu.full(2)])
    assert set(manager.ready) == {cpu.full(4), cpu.full(2)}


def test_a_warm_up_must_have_the_host_scalars_of_its_capture(cpu):
    """Host scalars decide which kernels are launched, and a capture must not load a kernel."""

    class Short(cpu.Toy):
        def stage(self, key, phase):
            reach = 1 if phase is Phase.WARMUP else cpu.WINDOW
            return self.step(key, [1] * key.num_tokens, [0] * key.num_tokens, reach)

    toy = Short()
    with pytest.raises(CaptureError, match=r"FULL 8 tokens.*different host scalars.*: reach is 4, above 1"):
        cpu.manager().capture(toy, toy.body)


@pytest.mark.parametrize("capturing", [True, False])
def test_a_failed_capture_leaves_the_manager_usable(kit, capturing):
    toy = kit.Toy()
    manager = kit.manager()
    collecting = gc.isenabled()
    with pytest.raises(CaptureError, match=r"FULL 2 tokens, 2 requests, 1 each: .*by zero") as error:
        manager.capture(toy, fail_at(toy.body, 2, capturing=capturing))
    assert gc.isenabled() is collecting
    causes = [error.value.__cause__, getattr(error.value.__cause__, "__cause__", None)]
    assert any(isinstance(cause, ZeroDivisionError) for cause in causes)
    assert list(manager.ready) == [kit.full(8), kit.full(4)]
    assert manager.pending == (kit.full(1),)
    assert [event.key for event in manager.report.failures] == [kit.full(2)]
    with pytest.raises(NotCaptured, match=r"FULL 2 tokens.*its capture failed: .*by zero"):
        manager.replay(kit.full(2), toy.stage(kit.full(2), Phase.RUN))
    for num in (8, 4):
        expected = toy.body(Execution(None, toy.fuzz(kit.full(num), 1).state))["hidden"].clone()
        replayed = manager.replay(kit.full(num), toy.fuzz(kit.full(num), 1))["hidden"]
        assert torch.equal(replayed, expected)
    manager.capture_pending(0.0)
    assert list(manager.ready) == [kit.full(8), kit.full(4), kit.full(1)], "a failed key is not tried again"
    manager.capture(toy, toy.body)
    assert manager.pending == ()
    assert manager.report.failures == ()


def test_the_session_ends_after_any_error(cpu):
    class Backend(cpu.Backend):
        events = ()

        @contextlib.contextmanager
        def session(self):
            self.events += ("open",)
            try:
                with super().session():
                    yield
            finally:
                self.events += ("close",)

    backend, toy = Backend(), cpu.Toy()
    manager = CudaGraphManager(cpu.dispatcher(), backend)
    with pytest.raises(CaptureError):
        manager.capture(toy, fail_at(toy.body, 8))
    with pytest.raises(KeyboardInterrupt):
        manager.capture(toy, fail_at(toy.body, 4, error=KeyboardInterrupt))
    assert backend.events == ("open", "close") * 2
    assert list(manager.ready) == [cpu.full(8)]
    assert manager.pending == (cpu.full(4), cpu.full(2), cpu.full(1)), "an interrupted key is pending"
    manager.capture(toy, toy.body, keys=())
    manager.capture(toy, toy.body)
    manager.capture(toy, toy.body)
    assert backend.events == ("open", "close") * 3


def test_keep_going_records_failures_in_the_report(kit):
    toy = kit.Toy()
    manager = kit.manager()
    manager.capture(toy, fail_at(toy.body, 8, 2), keep_going=True)
    assert list(manager.ready) == [kit.full(4), kit.full(1)]
    events = manager.report.failures
    assert [event.key for event in events] == [kit.full(8), kit.full(2)]
    assert all("by zero" in event.reason for event in events)
    assert manager.pending == ()


def test_a_host_read_is_refused(kit):
    toy = kit.Toy()
    manager = kit.manager()

    def body(x):
        return toy.weight[: x.state.schedule[0].item()]

    with pytest.raises(HostSync, match="FULL 8 tokens"):
        manager.capture(toy, body)
    assert manager.report.failures[0].key == kit.full(8)


def test_keys_must_be_in_the_dispatcher_and_not_captured(cpu):
    toy = cpu.Toy()
    manager = cpu.manager()
    with pytest.raises(ValueError, match=r"keys: FULL 3 tokens.* is not in the dispatcher; nearest: FULL 2 .*FULL 4"):
        manager.capture(toy, toy.body, keys=[cpu.full(8), cpu.full(3)])
    assert not manager.ready
    assert manager.producer is None
    manager.capture(toy, toy.body, keys=[cpu.full(8), cpu.full(8)])
    with pytest.raises(ValueError, match=r"keys: FULL 8 tokens.* is captured; release it"):
        manager.capture(toy, toy.body, keys=[cpu.full(8)])


def test_capture_pending_keeps_its_time_budget(cpu, monkeypatch):
    toy = cpu.Toy()
    clock = [0.0]
    monkeypatch.setattr(manager_module, "perf_counter", lambda: clock[0])

    def body(x):
        clock[0] += 1.0  # twice per key: warm-up, capture
        return toy.body(x)

    manager = cpu.manager()
    with pytest.raises(CaptureError, match=r"capture\(producer, body, keys=\(\)\)"):
        manager.capture_pending(1.0)
    with pytest.raises(ValueError, match="budget_s=-1"):
        manager.capture_pending(-1.0)
    assert len(manager.capture(toy, body, keys=())) == 0
    assert list(manager.capture_pending(0.0)) == [cpu.full(8)], "at least one"
    assert list(manager.capture_pending(3.5)) == [cpu.full(8), cpu.full(4), cpu.full(2)]
    assert list(manager.capture_pending(1e9)) == list(manager.dispatcher.keys)
    assert manager.capture_pending(1e9) is manager.states
    assert manager.report.seconds == 8.0


def test_release_and_capture_again_gives_the_same(kit):
    toy = kit.Toy()
    manager = kit.manager()
    manager.capture(toy, toy.body)

    def results():
        found = []
        for num in (8, 4, 1):
            staged = toy.fuzz(kit.full(num), num)
            found.append(manager.replay(kit.full(num), staged)["hidden"].clone())
        return found

    first = results()
    with pytest.raises(NotCaptured, match="PIECEWISE 8"):
        manager.release([kit.full(8), kit.pieces(8)], reason="half")
    with pytest.raises(ValueError, match="reason=''"):
        manager.release(reason="")
    assert manager.pending == ()
    manager.release([kit.full(8)], reason="one")
    assert manager.pending == (kit.full(8),)
    manager.release(reason="the workspace grew")
    assert manager.pending == manager.dispatcher.keys
    assert len(manager.states) == 0
    manager.capture(toy, toy.body)
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    events = manager.report.releases
    assert [event.reason for event in events] == ["one"] + ["the workspace grew"] * 3
    assert events[0].key == kit.full(8)
    captured = manager.states[kit.full(8)]
    manager.release([kit.full(8)], reason="once more")
    with pytest.raises(NotCaptured, match="it was released: once more"):
        manager.states[kit.full(8)]
    with pytest.raises(GraphError, match="released"):
        captured.graph.replay(None)


def test_a_buffer_that_moves_between_captures_is_found(kit):
    toy = kit.Toy()
    manager = kit.manager()
    manager.capture(toy, toy.body, keys=[kit.full(8)])
    toy.buffers["window"] = toy.weight.new_zeros(16, kit.WINDOW)
    with pytest.raises(CaptureError, match=r"AddressMoved.*FULL 8 tokens.*buffer window"):
        manager.capture(toy, toy.body)
    manager.release(reason="window grew")
    manager.capture(toy, toy.body)
    assert manager.pending == ()


def test_a_buffer_of_an_early_capture_that_moves_late_is_found(kit):
    """Only the latest captured key is compared. Its addresses include those of all earlier keys."""
    toy = kit.Toy()
    manager = kit.manager()
    manager.capture(toy, toy.body, keys=[kit.full(8)])
    toy.buffers["late"] = torch.zeros(4, device=toy.device)
    manager.capture(toy, toy.body, keys=[kit.full(4), kit.full(2)])
    manager.release([kit.full(2)], reason="so that it is not the latest")
    toy.buffers["schedule"] = torch.zeros_like(toy.buffers["schedule"])
    with pytest.raises(CaptureError, match=r"AddressMoved.*FULL 4 tokens.*buffer schedule"):
        manager.capture(toy, toy.body)


def test_the_number_of_address_checks_is_linear_in_the_number_of_keys(cpu):
    class Counting(cpu.Toy):
        count = 0

        def addresses(self):
            self.count += 1
            return super().addresses()

    counts = []
    for size in (4, 8):
        toy = Counting()
        other = cpu.Toy()
        manager = CudaGraphManager(cpu.dispatcher(range(1, 1 + size), "FULL_AND_PIECEWISE"), cpu.Backend())
        manager.capture(other, other.body, keys=[cpu.pieces(1)])
        manager.capture(toy, toy.body)
        counts.append(toy.count)
    assert counts == [2 * 7 - 1, 2 * 15 - 1], "one call per key, and one check for each key after the first"


def test_paranoid_capture_finds_a_buffer_that_staging_does_not_write(cpu):
    class KeepsSlots(cpu.Toy):
        def step(self, key, tokens, slots, reach=1):
            old_slots = self.buffers["slots"].clone()
            staged = super().step(key, tokens, slots, reach)
            self.buffers["slots"].copy_(old_slots)
            return staged

    toy = KeepsSlots()
    cpu.manager().capture(toy, toy.body)
    with pytest.raises(CaptureError, match=r"FULL 8 tokens.*IndexError"):
        cpu.manager(checks=ReplayChecks.PARANOID).capture(toy, toy.body)


def test_paranoid_poisons_before_every_staging(cpu):
    class Counting(cpu.Toy):
        order = ()

        def poison(self):
            self.order += ("poison",)
            super().poison()

        def step(self, *args, **options):
            self.order += ("stage",)
            return super().step(*args, **options)

    for checks, each in ((ReplayChecks.ADDRESSES, ("stage",)), (ReplayChecks.PARANOID, ("poison", "stage"))):
        toy = Counting()
        manager = cpu.manager(checks=checks)
        manager.capture(toy, toy.body, keys=[cpu.full(2)])
        manager.states[cpu.full(2)].restage(Phase.RUN)
        manager.verify(fuzz=1)
        assert toy.order == each * 5, "warm-up, capture, restage, and two runs"


def test_the_progress_argument_shows_the_progress(cpu, capsys):
    tqdm = pytest.importorskip("tqdm", reason="tqdm is not installed").tqdm
    toy = cpu.Toy()
    manager = cpu.manager()
    manager.capture(toy, toy.body, keys=[cpu.full(8)])
    assert capsys.readouterr().err == ""
    manager.capture(toy, toy.body, keys=[cpu.full(4), cpu.full(2)], progress=tqdm)
    assert "2/2" in capsys.readouterr().err
    seen = []
    manager.capture_pending(1.0, progress=lambda keys: (seen.append(key) or key for key in keys))
    assert (seen, manager.pending) == ([cpu.full(1)], ())
