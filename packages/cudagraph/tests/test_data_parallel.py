"""Joint dispatch of data-parallel ranks: one graph for all ranks, or eager execution with the rank and the reason."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor, UnpaddedBatch
from bateleur.cudagraph.data_parallel import (
    NO_COMMON_VARIANT,
    JointDispatch,
    LocalCoordinator,
    RankStep,
    RankStepCodec,
    dispatch_jointly,
)
from bateleur.cudagraph.dispatcher import CudagraphDispatcher, DispatchDecision, DispatchReason
from bateleur.cudagraph.modes import CudaGraphMode

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE
VARIANTS = ((), ("lora", 2))


@st.composite
def dispatchers(draw: st.DrawFn) -> CudagraphDispatcher:
    return CudagraphDispatcher.make(
        draw(st.sampled_from(CudaGraphMode)),
        draw(st.lists(st.integers(1, 70), max_size=5)),
        max_num_reqs=draw(st.none() | st.integers(1, 40)),
        query_lens=draw(st.lists(st.integers(1, 4), max_size=2, unique=True)),
        variants=VARIANTS[: draw(st.integers(1, 2))],
    )


@st.composite
def batches(draw: st.DrawFn) -> UnpaddedBatch:
    if draw(st.booleans()):
        lens = [draw(st.integers(1, 3))] * draw(st.integers(1, 30))
    else:
        lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    uniform = lens[0] if len(set(lens)) == 1 else None
    variant = draw(st.sampled_from([(), (), (), ("lora", 2), (7,)]))
    return UnpaddedBatch(len(lens), sum(lens), uniform, max(lens), draw(st.sampled_from([True, True, False])), variant)


@st.composite
def rank_steps(draw: st.DrawFn) -> tuple[CudagraphDispatcher, list[RankStep]]:
    dispatcher = draw(dispatchers())
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        ready = None
        if draw(st.integers(0, 3)) == 0:
            ready = frozenset(key for key in dispatcher.keys if draw(st.booleans()))
        steps.append(RankStep(draw(st.none() | batches()), ready))
    return dispatcher, steps


def fits(key: BatchExecutionDescriptor, batch: UnpaddedBatch, kind: DispatchReason) -> bool:
    """Return whether a key can run a batch, independently of the dispatcher."""
    return (
        (batch.decode_only or kind is not DispatchReason.DECODE)
        and key.variant == batch.variant
        and key.num_tokens >= batch.num_tokens
        and (key.num_reqs is None or key.num_reqs >= batch.num_reqs)
        and key.uniform_query_len in (None, batch.query_len)
        and (key.max_query_len is None or key.max_query_len >= batch.max_query_len)
    )


@settings(max_examples=200, deadline=None)
@given(rank_steps())
def test_the_graph_fits_every_rank(inputs: tuple[CudagraphDispatcher, list[RankStep]]) -> None:
    dispatcher, steps = inputs
    joint = dispatch_jointly(steps, dispatcher)
    batches_given = [p.batch for p in steps if p.batch is not None]
    if not batches_given:
        assert joint == JointDispatch(None, None, DispatchReason.IDLE)
        return
    assert joint.batch is not None
    assert joint.batch.num_tokens == max(batch.num_tokens for batch in batches_given)
    assert joint.batch.num_reqs == max(batch.num_reqs for batch in batches_given)
    key = joint.descriptor
    if key is None:
        assert joint.reason.startswith("eager")
        assert joint.num_tokens == joint.batch.num_tokens
        return
    assert joint.num_tokens == key.num_tokens
    for step in steps:
        assert step.ready is None or key in step.ready
        local = joint.decision_for(step.batch)
        tokens, reqs = (0, 0) if step.batch is None else (step.batch.num_tokens, step.batch.num_reqs)
        assert (local.descriptor, local.reason) == (key, joint.reason)
        assert local.pad_tokens == key.num_tokens - tokens >= 0
        assert local.pad_reqs == (0 if key.num_reqs is None else key.num_reqs - reqs) >= 0
        assert step.batch is None or fits(key, step.batch, joint.reason)


@settings(max_examples=200, deadline=None)
@given(rank_steps())
def test_ranks_run_eagerly_only_if_no_key_fits_all(inputs: tuple[CudagraphDispatcher, list[RankStep]]) -> None:
    dispatcher, steps = inputs
    joint = dispatch_jointly(steps, dispatcher)
    batches_given = [p.batch for p in steps if p.batch is not None]
    if joint.descriptor is not None or not batches_given:
        return
    for key in dispatcher.keys:
        ready = all(p.ready is None or key in p.ready for p in steps)
        mixed = key.mode is PIECEWISE or (
            dispatcher.mode is FULL and key.uniform_query_len is None and key.max_query_len == key.num_tokens
        )
        kind = DispatchReason.MIXED if mixed else DispatchReason.DECODE
        assert not (ready and all(fits(key, batch, kind) for batch in batches_given))
    if joint.rank is not None:
        named = steps[joint.rank]
        batch = joint.batch if joint.reason is DispatchReason.NOT_CAPTURED else named.batch
        assert batch is not None
        assert dispatcher.dispatch(batch, named.ready) == DispatchDecision(None, joint.reason)
    elif joint.reason is not DispatchReason.NOT_CAPTURED:
        assert all(dispatcher.dispatch(batch).descriptor is not None for batch in batches_given)


@settings(max_examples=150, deadline=None)
@given(rank_steps(), st.randoms(use_true_random=False))
def test_the_order_of_ranks_changes_only_the_rank_field(
    inputs: tuple[CudagraphDispatcher, list[RankStep]], rng: random.Random
) -> None:
    dispatcher, steps = inputs
    before = dispatch_jointly(steps, dispatcher)
    order = list(range(len(steps)))
    rng.shuffle(order)
    after = dispatch_jointly([steps[i] for i in order], dispatcher)
    assert dataclasses.replace(after, rank=before.rank) == before
    assert (after.rank is None) == (before.rank is None)
    if before.rank is not None and after.rank is not None and before.reason is not DispatchReason.NOT_CAPTURED:
        named = steps[order[after.rank]].batch
        assert named is not None
        assert dispatcher.dispatch(named).reason is before.reason


@settings(max_examples=150, deadline=None)
@given(rank_steps(), st.integers(1, 4))
def test_joint_dispatch_of_the_joint_batch_gives_the_same(
    inputs: tuple[CudagraphDispatcher, list[RankStep]], num_ranks: int
) -> None:
    dispatcher, steps = inputs
    once = dispatch_jointly(steps, dispatcher)
    ready = frozenset(k for k in dispatcher.keys if all(p.ready is None or k in p.ready for p in steps))
    twice = dispatch_jointly([RankStep(once.batch, ready)] * num_ranks, dispatcher)
    assert (twice.batch, twice.descriptor, twice.num_tokens) == (once.batch, once.descriptor, once.num_tokens)
    if once.rank is None:
        assert twice.reason is once.reason


@settings(max_examples=100, deadline=None)
@given(dispatchers(), batches(), st.data())
def test_one_rank_gets_its_own_decision(
    dispatcher: CudagraphDispatcher, batch: UnpaddedBatch, data: st.DataObject
) -> None:
    ready = frozenset(key for key in dispatcher.keys if data.draw(st.booleans()))
    for allowed in (None, ready):
        joint = LocalCoordinator(dispatcher).coordinate(RankStep(batch, allowed))
        assert joint.batch == batch
        assert joint.decision_for(batch) == dispatcher.dispatch(batch, allowed)
        assert joint.rank == (0 if joint.descriptor is None else None)


@settings(max_examples=200, deadline=None)
@given(rank_steps())
def test_a_rank_step_is_encoded_and_decoded(inputs: tuple[CudagraphDispatcher, list[RankStep]]) -> None:
    dispatcher, steps = inputs
    codec = RankStepCodec(dispatcher)
    for step in steps:
        vector = codec.encode(step)
        assert len(vector) == codec.length
        assert all(-1 <= number < 2**62 for number in vector)
        back = codec.decode(vector)
        batch = step.batch
        if batch is not None and batch.variant not in dispatcher.variants:
            batch = dataclasses.replace(batch, variant=NO_COMMON_VARIANT)
        assert back.batch == batch
        for key in dispatcher.keys:
            assert (back.ready is None or key in back.ready) == (step.ready is None or key in step.ready)
    sent = dispatch_jointly([codec.decode(codec.encode(step)) for step in steps], dispatcher)
    here = dispatch_jointly(steps, dispatcher)
    assert (sent.descriptor, sent.reason, sent.rank) == (here.descriptor, here.reason, here.rank)


def test_more_than_62_keys_need_more_words() -> None:
    dispatcher = CudagraphDispatcher.make(PIECEWISE, range(1, 131))
    codec = RankStepCodec(dispatcher)
    assert codec.length == 6 + 3
    ready = frozenset((dispatcher.keys[0], dispatcher.keys[61], dispatcher.keys[62], dispatcher.keys[129]))
    assert codec.decode(codec.encode(RankStep(None, ready))) == RankStep(None, ready)
    assert codec.decode(codec.encode(RankStep(None))) == RankStep(None)


def test_different_dispatchers_have_different_fingerprints() -> None:
    def fingerprint(sizes: Sequence[int], mode: CudaGraphMode = FULL) -> int:
        return RankStepCodec(CudagraphDispatcher.make(mode, sizes)).fingerprint

    assert fingerprint([1, 2]) == fingerprint([2, 1])
    assert len({fingerprint([1, 2]), fingerprint([1, 3]), fingerprint([1, 2], PIECEWISE)}) == 3


DISPATCHER = CudagraphDispatcher.make(CudaGraphMode.FULL_AND_PIECEWISE, [2, 4, 8, 16, 32], query_lens=(1, 2))
DECODE_ONLY = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [2, 4, 8, 16, 32], query_lens=(1, 2))


def decode(num_reqs: int, query_len: int = 1) -> UnpaddedBatch:
    return UnpaddedBatch(num_reqs, num_reqs * query_len, query_len, query_len, True)


PREFILL = UnpaddedBatch(1, 12, 12, 12, False)


def test_the_graph_holds_the_largest_batch_of_all_ranks() -> None:
    joint = dispatch_jointly([RankStep(decode(3)), RankStep(decode(7)), RankStep(None)], DISPATCHER)
    assert joint == JointDispatch(decode(7), BatchExecutionDescriptor(FULL, 8, 8, 1, 1), DispatchReason.DECODE)
    assert str(joint) == "all ranks: FULL 8 tokens, 8 requests, 1 each"
    assert joint.decision_for(decode(3)) == DispatchDecision(joint.descriptor, DispatchReason.DECODE, 5, 5)
    assert joint.decision_for(None) == DispatchDecision(joint.descriptor, DispatchReason.DECODE, 8, 8)
    assert joint.num_tokens == 8


def test_a_prefill_row_on_one_rank_excludes_the_decode_graph() -> None:
    joint = dispatch_jointly([RankStep(decode(3)), RankStep(PREFILL)], DISPATCHER)
    assert (joint.descriptor, joint.reason) == (BatchExecutionDescriptor(PIECEWISE, 16), DispatchReason.PIECEWISE)
    assert joint.decision_for(decode(3)).pad_tokens == 13
    chunks = dataclasses.replace(decode(3), decode_only=False)  # one token each, the shape of decodes
    assert dispatch_jointly([RankStep(decode(3)), RankStep(chunks)], DISPATCHER).reason is DispatchReason.PIECEWISE
    eager = dispatch_jointly([RankStep(decode(3)), RankStep(PREFILL), RankStep(decode(99))], DECODE_ONLY)
    assert (eager.descriptor, eager.reason, eager.rank, eager.num_tokens) == (None, DispatchReason.HAS_PREFILL, 1, 99)
    assert str(eager) == "rank 1: eager: no graphs for batches with a prefill row"
    assert (
        eager.decision_for(decode(3)) == eager.decision_for(None) == DispatchDecision(None, DispatchReason.HAS_PREFILL)
    )


def test_query_lengths_must_be_equal_for_a_uniform_graph() -> None:
    joint = dispatch_jointly([RankStep(decode(3)), RankStep(decode(3, 2))], DECODE_ONLY)
    assert (joint.descriptor, joint.reason, joint.rank) == (None, DispatchReason.QUERY_LEN, None)
    assert str(joint) == "all ranks: eager: no graph for this query length"
    assert dispatch_jointly([RankStep(decode(3, 2)), RankStep(decode(4, 2))], DECODE_ONLY).num_tokens == 8


def test_ranks_with_different_variants_have_no_common_graph() -> None:
    dispatcher = CudagraphDispatcher.make(FULL, [4], variants=VARIANTS)
    lora = dataclasses.replace(decode(2), variant=("lora", 2))
    assert dispatch_jointly([RankStep(lora), RankStep(lora)], dispatcher).reason is DispatchReason.DECODE
    assert dispatch_jointly([RankStep(lora), RankStep(decode(2))], dispatcher) == JointDispatch(
        dataclasses.replace(lora, variant=NO_COMMON_VARIANT), None, DispatchReason.VARIANT
    )


def test_a_rank_that_has_not_captured_the_graph_excludes_it_even_without_requests() -> None:
    small, large = BatchExecutionDescriptor(FULL, 4, 4, 1, 1), BatchExecutionDescriptor(FULL, 8, 8, 1, 1)
    both = frozenset((small, large))
    joint = dispatch_jointly([RankStep(decode(3), both), RankStep(None, frozenset((large,)))], DECODE_ONLY)
    assert joint.descriptor == large
    nothing = dispatch_jointly([RankStep(decode(3), both), RankStep(None, frozenset())], DECODE_ONLY)
    assert (nothing.descriptor, nothing.reason, nothing.rank) == (None, DispatchReason.NOT_CAPTURED, 1)
    ready = [frozenset((small,)), frozenset((large,))]
    apart = dispatch_jointly([RankStep(decode(3), each) for each in ready], DECODE_ONLY)
    assert (apart.descriptor, apart.reason, apart.rank) == (None, DispatchReason.NOT_CAPTURED, None)


def test_no_rank_runs_if_all_are_idle() -> None:
    joint = dispatch_jointly([RankStep(None), RankStep(None, frozenset())], DISPATCHER)
    assert joint == JointDispatch(None, None, DispatchReason.IDLE)
    assert joint.num_tokens == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="must have one item per rank"):
        dispatch_jointly([], DISPATCHER)
    joint = dispatch_jointly([RankStep(decode(3)), RankStep(decode(2))], DISPATCHER)
    with pytest.raises(ValueError, match=r"batch of 4 requests and 4 tokens exceeds .* of 3 requests and 3 tokens"):
        joint.decision_for(decode(4))
    with pytest.raises(ValueError, match="exceeds the joint batch of 0 requests and 0 tokens"):
        dispatch_jointly([RankStep(None)], DISPATCHER).decision_for(decode(1))
