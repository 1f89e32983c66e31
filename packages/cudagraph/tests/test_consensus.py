"""Agreement of ranks: one graph that holds every rank's batch, or eager everywhere with the rank and the reason."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.cudagraph.consensus import NO_COMMON_VARIANT, Agreement, Bid, BidCodec, LocalConsensus, fold
from bateleur.cudagraph.decision import Ask, Decision, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.modes import CudaGraphMode
from bateleur.cudagraph.plan import CapturePlan

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE
VARIANTS = ((), ("lora", 2))


@st.composite
def plans(draw: st.DrawFn) -> CapturePlan:
    return CapturePlan.make(
        draw(st.sampled_from(CudaGraphMode)),
        draw(st.lists(st.integers(1, 70), max_size=5)),
        max_num_reqs=draw(st.none() | st.integers(1, 40)),
        query_lens=draw(st.lists(st.integers(1, 4), max_size=2, unique=True)),
        variants=VARIANTS[: draw(st.integers(1, 2))],
    )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    if draw(st.booleans()):
        lens = [draw(st.integers(1, 3))] * draw(st.integers(1, 30))
    else:
        lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    uniform = lens[0] if len(set(lens)) == 1 else None
    variant = draw(st.sampled_from([(), (), (), ("lora", 2), (7,)]))
    return Ask(len(lens), sum(lens), uniform, max(lens), draw(st.sampled_from([True, True, False])), variant)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[CapturePlan, list[Bid]]:
    plan = draw(plans())
    bids = []
    for _ in range(draw(st.integers(1, 5))):
        ready = None
        if draw(st.integers(0, 3)) == 0:
            ready = frozenset(key for key in plan.keys if draw(st.booleans()))
        bids.append(Bid(draw(st.none() | asks()), ready))
    return plan, bids


def holds(key: BatchExecutionDescriptor, ask: Ask, kind: Why) -> bool:
    """The contract of a key, written down a second time."""
    return (
        (ask.decode_only or kind is not Why.DECODE)
        and key.variant == ask.variant
        and key.num_tokens >= ask.num_tokens
        and (key.num_reqs is None or key.num_reqs >= ask.num_reqs)
        and key.uniform_query_len in (None, ask.query_len)
        and (key.max_query_len is None or key.max_query_len >= ask.max_query_len)
    )


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_j1_the_agreement_is_admissible_for_every_rank(world: tuple[CapturePlan, list[Bid]]) -> None:
    plan, bids = world
    agreement = fold(bids, plan)
    busy = [p.ask for p in bids if p.ask is not None]
    if not busy:
        assert agreement == Agreement(None, None, Why.IDLE)
        return
    assert agreement.ask is not None
    assert agreement.ask.num_tokens == max(ask.num_tokens for ask in busy)
    assert agreement.ask.num_reqs == max(ask.num_reqs for ask in busy)
    key = agreement.descriptor
    if key is None:
        assert agreement.why.startswith("eager")
        assert agreement.num_tokens == agreement.ask.num_tokens
        return
    assert agreement.num_tokens == key.num_tokens
    for bid in bids:
        assert bid.ready is None or key in bid.ready
        local = agreement.decision(bid.ask)
        tokens, reqs = (0, 0) if bid.ask is None else (bid.ask.num_tokens, bid.ask.num_reqs)
        assert (local.descriptor, local.why) == (key, agreement.why)
        assert local.pad_tokens == key.num_tokens - tokens >= 0
        assert local.pad_reqs == (0 if key.num_reqs is None else key.num_reqs - reqs) >= 0
        assert bid.ask is None or holds(key, bid.ask, agreement.why)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_j1_eager_only_if_no_key_serves_all(world: tuple[CapturePlan, list[Bid]]) -> None:
    plan, bids = world
    agreement = fold(bids, plan)
    busy = [p.ask for p in bids if p.ask is not None]
    if agreement.descriptor is not None or not busy:
        return
    for key in plan.keys:
        ready = all(p.ready is None or key in p.ready for p in bids)
        mixed = key.mode is PIECEWISE or (
            plan.mode is FULL and key.uniform_query_len is None and key.max_query_len == key.num_tokens
        )
        kind = Why.MIXED if mixed else Why.DECODE
        assert not (ready and all(holds(key, ask, kind) for ask in busy))
    if agreement.rank is not None:
        blamed = bids[agreement.rank]
        ask = agreement.ask if agreement.why is Why.NOT_READY else blamed.ask
        assert ask is not None
        assert plan.decide(ask, blamed.ready) == Decision(None, agreement.why)
    elif agreement.why is not Why.NOT_READY:
        assert all(plan.decide(ask).descriptor is not None for ask in busy)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_j1_the_order_of_ranks_changes_only_the_number_of_the_rank(
    world: tuple[CapturePlan, list[Bid]], rng: random.Random
) -> None:
    plan, bids = world
    before = fold(bids, plan)
    order = list(range(len(bids)))
    rng.shuffle(order)
    after = fold([bids[i] for i in order], plan)
    assert dataclasses.replace(after, rank=before.rank) == before
    assert (after.rank is None) == (before.rank is None)
    if before.rank is not None and after.rank is not None and before.why is not Why.NOT_READY:
        blamed = bids[order[after.rank]].ask
        assert blamed is not None
        assert plan.decide(blamed).why is before.why


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(1, 4))
def test_j1_folding_the_result_again_changes_nothing(
    world: tuple[CapturePlan, list[Bid]], num_ranks: int
) -> None:
    plan, bids = world
    once = fold(bids, plan)
    ready = frozenset(k for k in plan.keys if all(p.ready is None or k in p.ready for p in bids))
    twice = fold([Bid(once.ask, ready)] * num_ranks, plan)
    assert (twice.ask, twice.descriptor, twice.num_tokens) == (once.ask, once.descriptor, once.num_tokens)
    if once.rank is None:
        assert twice.why is once.why


@settings(max_examples=100, deadline=None)
@given(plans(), asks(), st.data())
def test_one_rank_agrees_with_itself(plan: CapturePlan, ask: Ask, data: st.DataObject) -> None:
    ready = frozenset(key for key in plan.keys if data.draw(st.booleans()))
    for allowed in (None, ready):
        agreement = LocalConsensus(plan).agree(Bid(ask, allowed))
        assert agreement.ask == ask
        assert agreement.decision(ask) == plan.decide(ask, allowed)
        assert agreement.rank == (0 if agreement.descriptor is None else None)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_a_proposal_survives_the_wire(world: tuple[CapturePlan, list[Bid]]) -> None:
    plan, bids = world
    codec = BidCodec(plan)
    for bid in bids:
        vector = codec.encode(bid)
        assert len(vector) == codec.length
        assert all(-1 <= number < 2**62 for number in vector)
        back = codec.decode(vector)
        ask = bid.ask
        if ask is not None and ask.variant not in plan.variants:
            ask = dataclasses.replace(ask, variant=NO_COMMON_VARIANT)
        assert back.ask == ask
        for key in plan.keys:
            assert (back.ready is None or key in back.ready) == (bid.ready is None or key in bid.ready)
    sent = fold([codec.decode(codec.encode(bid)) for bid in bids], plan)
    here = fold(bids, plan)
    assert (sent.descriptor, sent.why, sent.rank) == (here.descriptor, here.why, here.rank)


def test_many_keys_take_more_words() -> None:
    plan = CapturePlan.make(PIECEWISE, range(1, 131))
    codec = BidCodec(plan)
    assert codec.length == 6 + 3
    ready = frozenset((plan.keys[0], plan.keys[61], plan.keys[62], plan.keys[129]))
    assert codec.decode(codec.encode(Bid(None, ready))) == Bid(None, ready)
    assert codec.decode(codec.encode(Bid(None))) == Bid(None)


def test_a_fingerprint_tells_plans_apart() -> None:
    def fingerprint(sizes: Sequence[int], mode: CudaGraphMode = FULL) -> int:
        return BidCodec(CapturePlan.make(mode, sizes)).fingerprint

    assert fingerprint([1, 2]) == fingerprint([2, 1])
    assert len({fingerprint([1, 2]), fingerprint([1, 3]), fingerprint([1, 2], PIECEWISE)}) == 3


PLAN = CapturePlan.make(CudaGraphMode.FULL_AND_PIECEWISE, [2, 4, 8, 16, 32], query_lens=(1, 2))
DECODE_ONLY = CapturePlan.make(CudaGraphMode.FULL_DECODE_ONLY, [2, 4, 8, 16, 32], query_lens=(1, 2))


def decode(num_reqs: int, query_len: int = 1) -> Ask:
    return Ask(num_reqs, num_reqs * query_len, query_len, query_len, True)


PREFILL = Ask(1, 12, 12, 12, False)


def test_a_full_key_holds_the_requests_of_every_rank() -> None:
    agreement = fold([Bid(decode(3)), Bid(decode(7)), Bid(None)], PLAN)
    assert agreement == Agreement(decode(7), BatchExecutionDescriptor(FULL, 8, 8, 1, 1), Why.DECODE)
    assert str(agreement) == "all ranks: FULL 8 tokens, 8 requests, 1 each"
    assert agreement.decision(decode(3)) == Decision(agreement.descriptor, Why.DECODE, 5, 5)
    assert agreement.decision(None) == Decision(agreement.descriptor, Why.DECODE, 8, 8)
    assert agreement.num_tokens == 8


def test_a_prefill_anywhere_takes_all_ranks_off_the_decode_graph() -> None:
    agreement = fold([Bid(decode(3)), Bid(PREFILL)], PLAN)
    assert (agreement.descriptor, agreement.why) == (BatchExecutionDescriptor(PIECEWISE, 16), Why.PIECEWISE)
    assert agreement.decision(decode(3)).pad_tokens == 13
    chunks = dataclasses.replace(decode(3), decode_only=False)  # one token each, the shape of decodes
    assert fold([Bid(decode(3)), Bid(chunks)], PLAN).why is Why.PIECEWISE
    eager = fold([Bid(decode(3)), Bid(PREFILL), Bid(decode(99))], DECODE_ONLY)
    assert (eager.descriptor, eager.why, eager.rank, eager.num_tokens) == (None, Why.STATE, 1, 99)
    assert str(eager) == "rank 1: eager: no graphs for batches with a prefill row"
    assert eager.decision(decode(3)) == eager.decision(None) == Decision(None, Why.STATE)


def test_query_lengths_must_be_equal_for_a_uniform_graph() -> None:
    agreement = fold([Bid(decode(3)), Bid(decode(3, 2))], DECODE_ONLY)
    assert (agreement.descriptor, agreement.why, agreement.rank) == (None, Why.QUERY_LEN, None)
    assert str(agreement) == "all ranks: eager: no graph for this query length"
    assert fold([Bid(decode(3, 2)), Bid(decode(4, 2))], DECODE_ONLY).num_tokens == 8


def test_ranks_with_different_variants_have_no_common_graph() -> None:
    plan = CapturePlan.make(FULL, [4], variants=VARIANTS)
    lora = dataclasses.replace(decode(2), variant=("lora", 2))
    assert fold([Bid(lora), Bid(lora)], plan).why is Why.DECODE
    assert fold([Bid(lora), Bid(decode(2))], plan) == Agreement(
        dataclasses.replace(lora, variant=NO_COMMON_VARIANT), None, Why.VARIANT
    )


def test_a_rank_without_the_graph_keeps_all_from_it_even_when_idle() -> None:
    small, large = BatchExecutionDescriptor(FULL, 4, 4, 1, 1), BatchExecutionDescriptor(FULL, 8, 8, 1, 1)
    both = frozenset((small, large))
    agreement = fold([Bid(decode(3), both), Bid(None, frozenset((large,)))], DECODE_ONLY)
    assert agreement.descriptor == large
    nothing = fold([Bid(decode(3), both), Bid(None, frozenset())], DECODE_ONLY)
    assert (nothing.descriptor, nothing.why, nothing.rank) == (None, Why.NOT_READY, 1)
    ready = [frozenset((small,)), frozenset((large,))]
    apart = fold([Bid(decode(3), each) for each in ready], DECODE_ONLY)
    assert (apart.descriptor, apart.why, apart.rank) == (None, Why.NOT_READY, None)


def test_nobody_runs_when_all_are_idle() -> None:
    agreement = fold([Bid(None), Bid(None, frozenset())], PLAN)
    assert agreement == Agreement(None, None, Why.IDLE)
    assert agreement.num_tokens == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="bids must hold one of each rank"):
        fold([], PLAN)
    agreement = fold([Bid(decode(3)), Bid(decode(2))], PLAN)
    with pytest.raises(ValueError, match="ask of 4 requests and 4 tokens exceeds the agreed 3 and 3"):
        agreement.decision(decode(4))
    with pytest.raises(ValueError, match="exceeds the agreed 0 and 0"):
        fold([Bid(None)], PLAN).decision(decode(1))
