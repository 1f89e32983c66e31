"""Replays: the checks before them, equality with the eager run, and the state after a failure."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.cudagraph.backends.base import EagerBackend
from bateleur.cudagraph.batch_descriptor import UnpaddedBatch
from bateleur.cudagraph.errors import (
    AddressMoved,
    DanglingExternal,
    KeyMismatch,
    NotCaptured,
    ReplayFailed,
    SignatureMismatch,
    StaleState,
)
from bateleur.cudagraph.execution import Execution
from bateleur.cudagraph.manager import CudaGraphManager
from bateleur.cudagraph.replay_checks import ReplayChecks
from bateleur.cudagraph.staging import Phase, StagedBatch


def ready(kit, mode="FULL_DECODE_ONLY", **options):
    toy = kit.Toy()
    manager = kit.manager(mode, **options)
    manager.capture(toy, toy.body)
    return toy, manager


def test_a_batch_staged_for_another_key_is_refused(kit):
    toy, manager = ready(kit)
    staged = toy.step(kit.full(4), [1, 2, 3], [1, 2, 3])
    with pytest.raises(KeyMismatch, match=r"FULL 8 tokens.*staged for FULL 4 tokens"):
        manager.replay(kit.full(8), staged)
    eager = toy.step(None, [1, 2, 3], [1, 2, 3])
    with pytest.raises(KeyMismatch, match=r"staged for no graph \(an eager step\)"):
        manager.replay(kit.full(4), eager)
    with pytest.raises(NotCaptured, match=r"FULL 3 tokens.*not in the dispatcher"):
        manager.replay(kit.full(3), staged)
    again = toy.step(kit.full(4), [1, 2, 3], [1, 2, 3])
    with pytest.raises(StaleState, match="generation"):
        manager.replay(kit.full(4), staged)
    assert manager.replay(kit.full(4), again)["batch"].item() == 4


def test_the_captured_signature_must_admit_the_batch(kit):
    toy, manager = ready(kit)
    staged = toy.step(kit.full(4), [1], [1], reach=kit.WINDOW)
    manager.replay(kit.full(4), staged)
    beyond = StagedBatch(staged.key, staged.state, staged.generation, kit.Bound(kit.WINDOW + 1))
    with pytest.raises(SignatureMismatch, match=r"FULL 4 tokens.*: reach is 5, above 4"):
        manager.replay(kit.full(4), beyond)
    bare = StagedBatch(staged.key, staged.state, staged.generation)
    with pytest.raises(SignatureMismatch, match="was staged without a signature"):
        manager.replay(kit.full(4), bare)
    unsigned = kit.Toy()
    unsigned.stage = lambda key, phase: StagedBatch(key, kit.Toy.stage(unsigned, key, phase).state, unsigned.generation)
    plain = kit.manager()
    plain.capture(unsigned, unsigned.body, keys=[kit.full(4)])
    with pytest.raises(SignatureMismatch, match="was captured without a signature"):
        plain.replay(kit.full(4), unsigned.step(kit.full(4), [1], [1]))
    assert plain.replay(kit.full(4), unsigned.stage(kit.full(4), Phase.RUN))["batch"].item() == 4


def test_a_buffer_that_was_replaced_is_found(kit):
    toy, manager = ready(kit, checks=ReplayChecks.ADDRESSES)
    old = toy.buffers["slots"]
    toy.buffers["slots"] = torch.zeros_like(old)
    with pytest.raises(AddressMoved, match="buffer slots was captured at"):
        manager.replay(kit.full(4), toy.step(kit.full(4), [1], [1]))
    assert kit.full(4) in manager.ready, "a failed check changes nothing"
    toy.buffers["slots"] = old
    toy.buffers["more"] = toy.weight.clone()
    manager.replay(kit.full(4), toy.step(kit.full(4), [1], [1]))


def test_freed_external_memory_is_found(kit):
    toy, manager = ready(kit, checks=ReplayChecks.ADDRESSES)
    staged = toy.step(kit.full(4), [1], [1])
    manager.replay(kit.full(4), staged)
    toy.weight = toy.weight.clone()
    with pytest.raises(DanglingExternal):
        manager.replay(kit.full(4), staged)
    assert kit.full(4) in manager.ready, "a failed check changes nothing"


def test_the_recorded_backend_finds_freed_memory_at_any_level(cpu):
    toy, manager = ready(cpu, checks=ReplayChecks.OFF)
    toy.weight = toy.weight.clone()
    with pytest.raises(DanglingExternal):
        manager.replay(cpu.full(4), toy.step(cpu.full(4), [1], [1]))
    assert cpu.full(4) in manager.ready


def test_memory_is_checked_before_anything_runs(cpu, monkeypatch):
    """A CUDA graph would read freed memory without an error."""
    for checks in (ReplayChecks.CHEAP, ReplayChecks.ADDRESSES):
        toy, manager = ready(cpu, checks=checks)
        graph = manager.states[cpu.full(4)].graph

        def fail():
            raise DanglingExternal("freed")

        monkeypatch.setattr(graph, "check_externals", fail)
        staged = toy.step(cpu.full(4), [1], [1])
        if checks is ReplayChecks.CHEAP:
            manager.replay(cpu.full(4), staged)
            continue
        monkeypatch.setattr(graph, "replay", None)
        with pytest.raises(DanglingExternal):
            manager.replay(cpu.full(4), staged)


def test_addresses_that_the_producer_updates_in_place_are_checked(kit):
    toy = kit.Toy()
    addresses = dict(toy.addresses())
    toy.addresses = lambda: addresses
    manager = kit.manager(checks=ReplayChecks.ADDRESSES)
    manager.capture(toy, toy.body)
    addresses["window"] += 64
    with pytest.raises(AddressMoved, match="buffer window"):
        manager.replay(kit.full(4), toy.step(kit.full(4), [1], [1]))


def test_growth_of_a_workspace_is_found_and_invalidates_all_keys(kit):
    toy, manager = ready(kit, checks=ReplayChecks.ADDRESSES)
    toy.buffers["window"] = toy.weight.new_zeros(2 * kit.MAX, kit.WINDOW)
    for key in manager.dispatcher.keys:
        with pytest.raises(AddressMoved, match="buffer window"):
            manager.replay(key, toy.step(key, [1], [1]))
    manager.release(reason="window grew")
    assert manager.pending == manager.dispatcher.keys
    manager.capture(toy, toy.body)
    for key in manager.dispatcher.keys:
        assert manager.replay(key, toy.step(key, [1], [1]))["batch"].item() == key.num_tokens


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_a_tensor_that_is_allocated_in_each_step_is_refused(kit, mode):
    """The captured state keeps the first such tensor alive, so the graph would read that one in every step."""

    class Fresh(kit.Toy):
        def step(self, *args, **options):
            staged = super().step(*args, **options)
            staged.state.tokens = staged.state.tokens.clone()
            return staged

    for checks in (ReplayChecks.ADDRESSES, ReplayChecks.PARANOID):
        toy = Fresh()
        manager = kit.manager(mode, checks=checks)
        manager.capture(toy, toy.body)
        key = manager.dispatcher.keys[0]
        staged = toy.step(key, [1, 2], [1, 2])
        if checks is ReplayChecks.ADDRESSES:
            manager.replay(key, staged)
            continue
        with pytest.raises(AddressMoved, match=r" 8 tokens.*: state.tokens was captured as \(8,\) .* at 0x"):
            manager.replay(key, staged)
        assert key in manager.ready, "a failed check changes nothing"


def test_eager_parts_may_use_another_view_in_every_step(kit):
    """The captured dummy batch has decode and prefill rows, and a later step has only one kind."""

    class Viewing(kit.Toy):
        has_part = True

        def step(self, *args, **options):
            staged = super().step(*args, **options)
            staged.state.part = staged.state.tokens[:1] if self.has_part else None
            return staged

    toy, manager = Viewing(), kit.manager("PIECEWISE", checks=ReplayChecks.PARANOID)
    manager.capture(toy, toy.body)
    toy.has_part, key = False, manager.dispatcher.keys[0]
    staged = toy.step(key, [1, 2], [1, 2])
    assert manager.replay(key, staged)["batch"].item() == 8
    gone = dataclasses.replace(staged.state, tokens=None)
    with pytest.raises(AddressMoved, match="in this batch is missing"):
        manager.replay(key, dataclasses.replace(staged, state=gone))


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_a_batch_of_another_producer_is_refused(kit, mode):
    toy, manager = ready(kit, mode, checks=ReplayChecks.PARANOID)
    other, key = kit.Toy(), manager.dispatcher.keys[0]
    own = toy.step(key, [1], [1])
    while other.generation < toy.generation:
        foreign = other.step(key, [5], [5])
    with pytest.raises(AddressMoved, match=r"state\.tokens was captured as"):
        manager.replay(key, foreign)
    assert manager.replay(key, own)["batch"].item() == 8


def test_a_tensor_of_another_shape_or_missing_is_refused(kit):
    toy, manager = ready(kit, checks=ReplayChecks.PARANOID)
    staged = toy.step(kit.full(4), [1], [1])
    narrow = dataclasses.replace(staged.state, window=staged.state.window[:, :2])
    with pytest.raises(AddressMoved, match=r"\(4, 4\) with strides .* in this batch is \(4, 2\)"):
        manager.replay(kit.full(4), dataclasses.replace(staged, state=narrow))
    gone = dataclasses.replace(staged.state, window=None)
    with pytest.raises(AddressMoved, match="in this batch is missing"):
        manager.replay(kit.full(4), dataclasses.replace(staged, state=gone))


def test_external_memory_freed_between_two_pieces_releases_the_key(cpu):
    """The first piece has run, so this is a failed replay and not a failed check."""
    toy = cpu.Toy()
    kept = [torch.ones(cpu.MAX, 3)]

    def attend(state, hidden):
        if state.reach == 3:
            kept.clear()
        return hidden + 0

    def body(x):
        return x.eager(attend, toy.weight[x.state.tokens]) * kept[0][: len(x.state.tokens)]

    manager = cpu.manager("PIECEWISE")
    manager.capture(toy, body)
    manager.replay(cpu.pieces(4), toy.step(cpu.pieces(4), [1], [1]))
    with pytest.raises(ReplayFailed, match=r"PIECEWISE 4 tokens.*between two pieces: .*was freed since the capture"):
        manager.replay(cpu.pieces(4), toy.step(cpu.pieces(4), [1], [1], reach=3))
    assert cpu.pieces(4) not in manager.ready


def test_checks_off_replays_any_batch(kit):
    toy, manager = ready(kit, checks=ReplayChecks.OFF)
    staged = toy.step(kit.full(4), [1, 2], [1, 2])
    wrong = StagedBatch(kit.full(8), None, 0)
    assert manager.replay(kit.full(4), wrong)["batch"].item() == 4
    toy.step(kit.full(2), [1, 2], [1, 2])
    assert manager.replay(kit.full(4), staged)["batch"].item() == 2
    with pytest.raises(NotCaptured):
        manager.replay(kit.full(3), staged)


def test_the_replay_of_another_graph_overwrites_outputs(kit):
    toy, manager = ready(kit, checks=ReplayChecks.PARANOID)
    out = manager.replay(kit.full(4), toy.step(kit.full(4), [1], [1]))
    kept = out["hidden"].clone()
    manager.replay(kit.full(2), toy.step(kit.full(2), [1], [1]))
    assert torch.isfinite(kept).all()
    assert not torch.isclose(out["hidden"], kept).any(), "poisoned, or overwritten by another graph"
    again = manager.replay(kit.full(4), toy.step(kit.full(4), [1], [1]))
    assert again["hidden"] is out["hidden"]
    assert torch.isfinite(out["hidden"]).all()


def test_a_replay_that_raises_releases_its_key(cpu):
    """The outputs of the step before must not be used after a failed replay (kekzl/imp #1417)."""
    toy, manager = ready(cpu)
    manager.replay(cpu.full(4), toy.step(cpu.full(4), [1], [1]))
    staged = toy.step(cpu.full(4), [1], [99])
    with pytest.raises(ReplayFailed, match=r"FULL 4 tokens.*IndexError.*the key was released, run .* eagerly") as error:
        manager.replay(cpu.full(4), staged)
    assert isinstance(error.value.__cause__, IndexError)
    assert manager.pending == (cpu.full(4),)
    assert "IndexError" in manager.report.releases[0].reason
    with pytest.raises(NotCaptured, match="released: its replay failed"):
        manager.replay(cpu.full(4), staged)
    batch = UnpaddedBatch(4, 4, 1, 1, decode_only=True)
    assert manager.dispatcher.dispatch(batch, manager.ready).descriptor == cpu.full(8)
    manager.replay(cpu.full(8), toy.step(cpu.full(8), [1], [1]))


def test_an_eager_part_that_raises_releases_its_key(kit):
    toy = kit.Toy()

    def attend(state, hidden):
        if state.reach == 3:
            raise ZeroDivisionError
        return hidden + 0

    manager = kit.manager("PIECEWISE")
    manager.capture(toy, lambda x: x.eager(attend, toy.weight[x.state.tokens]) * 2)
    assert len(manager.replay(kit.pieces(4), toy.step(kit.pieces(4), [1], [1]))) == 4
    with pytest.raises(ReplayFailed, match=r"PIECEWISE 4 tokens.*ZeroDivisionError"):
        manager.replay(kit.pieces(4), toy.step(kit.pieces(4), [1], [1], reach=3))
    assert manager.pending == (kit.pieces(4),)


class Pair:
    """Runs each batch on a graph, and eagerly without padding on a copy of the model."""

    def __init__(self, kit, mode, order=None):
        self.toy, self.eager_toy = kit.Toy(), kit.Toy()
        self.manager = kit.manager(mode, checks=ReplayChecks.PARANOID)
        for key in order or self.manager.dispatcher.keys:
            self.manager.capture(self.toy, self.toy.body, keys=[key])
        self.toy.cache.zero_()
        self.used = set()

    def step(self, tokens, slots, reach, decode_only=True):
        num = len(tokens)
        key = self.manager.dispatcher.dispatch(
            UnpaddedBatch(num, num, 1, 1, decode_only), self.manager.ready
        ).descriptor
        self.used.add(key)
        out = self.manager.replay(key, self.toy.step(key, tokens, slots, reach))
        expected = self.eager_toy.body(Execution(None, self.eager_toy.step(None, tokens, slots, reach).state))
        assert torch.equal(out["hidden"][:num], expected["hidden"])
        assert torch.equal(self.toy.cache[1:], self.eager_toy.cache[1:]), "the cache, except for the null slot"


@pytest.mark.parametrize("order", list(itertools.permutations([8, 4, 2, 1]))[::5])
def test_any_capture_order(kit, order):
    pair = Pair(kit, "FULL_DECODE_ONLY", [kit.full(n) for n in order])
    for num in (8, 3, 1, 5, 2):
        pair.step(list(range(num)), list(range(1, num + 1)), 1 + num % kit.WINDOW)
    assert pair.used == {kit.full(n) for n in (8, 4, 1, 2)}


@pytest.fixture(scope="module", params=["FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"])
def pair(kit, request):
    return Pair(kit, request.param)


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 10), st.integers(1, 15)), min_size=1, max_size=8, unique_by=lambda p: p[1]),
        st.integers(1, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_batches_replays_like_eager(pair, steps):
    """The cache keeps its contents from step to step and from example to example. Sizes come in any order."""
    for rows, reach, decode_only in steps:
        if pair.manager.dispatcher.mode.mixed_mode.name == "NONE":
            decode_only = True
        pair.step([token for token, _ in rows], [slot for _, slot in rows], reach, decode_only)


def test_the_eager_backend_runs_the_body_on_the_given_batch(cpu):
    toy = cpu.Toy()
    manager = CudaGraphManager(cpu.dispatcher(), EagerBackend())
    manager.capture(toy, toy.body)
    for num in (8, 2):
        expected = toy.body(Execution(None, toy.fuzz(cpu.full(num), 1).state))["hidden"]
        assert torch.equal(manager.replay(cpu.full(num), toy.fuzz(cpu.full(num), 1))["hidden"], expected)
    assert manager.verify().ok
    assert manager.report.captured[0].num_graphs == 0


def test_no_gradients_are_recorded_by_any_run(kit):
    toy = kit.Toy()
    toy.weight.requires_grad_()
    manager = kit.manager()
    runs = []

    def body(x):
        out = toy.body(x)
        runs.append(out["hidden"].requires_grad)
        return out

    manager.capture(toy, body)
    assert manager.verify().ok
    assert runs
    assert not any(runs)
    assert not toy.cache.requires_grad
