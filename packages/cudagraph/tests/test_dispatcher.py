"""`CudagraphDispatcher`: the chosen graph fits the batch, and an eager batch has the right reason."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphMode,
    DispatchCounter,
    DispatchDecision,
    DispatchReason,
    UnpaddedBatch,
)

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE


@st.composite
def dispatchers(draw: st.DrawFn) -> CudagraphDispatcher:
    return CudagraphDispatcher.make(
        draw(st.sampled_from(CudaGraphMode)),
        draw(st.lists(st.integers(1, 70), max_size=6)),
        max_num_reqs=draw(st.none() | st.integers(1, 40)),
        max_num_tokens=draw(st.none() | st.integers(1, 80)),
        query_lens=draw(st.lists(st.integers(1, 5), max_size=2, unique=True)),
        variants=draw(st.sampled_from([((),), ((), ("lora", 2)), (("lora", 2),)])),
    )


@st.composite
def batches(draw: st.DrawFn) -> UnpaddedBatch:
    if draw(st.booleans()):
        lens = [draw(st.integers(1, 6))] * draw(st.integers(1, 30))
    else:
        lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    uniform = lens[0] if len(set(lens)) == 1 else None
    variant = draw(st.sampled_from([(), ("lora", 2), (7,)]))
    return UnpaddedBatch(len(lens), sum(lens), uniform, max(lens), draw(st.booleans()), variant)


def admits(key: BatchExecutionDescriptor, batch: UnpaddedBatch, decode_key: bool) -> bool:
    """Return whether a key can run a batch, independently of the dispatcher."""
    return (
        (batch.decode_only or not decode_key)
        and key.variant == batch.variant
        and key.num_tokens >= batch.num_tokens
        and (key.num_reqs is None or key.num_reqs >= batch.num_reqs)
        and (key.uniform_query_len is None or key.uniform_query_len == batch.query_len)
        and (key.max_query_len is None or key.max_query_len >= batch.max_query_len)
    )


def is_decode_key(dispatcher: CudagraphDispatcher, key: BatchExecutionDescriptor) -> bool:
    return key.uniform_query_len is not None


@settings(max_examples=300, deadline=None)
@given(dispatchers(), batches())
def test_the_graph_fits_the_batch(dispatcher: CudagraphDispatcher, batch: UnpaddedBatch) -> None:
    frozen = pickle.dumps((dispatcher.mode, dispatcher.keys, batch))
    decision = dispatcher.dispatch(batch)
    assert decision == dispatcher.dispatch(batch)
    assert pickle.dumps((dispatcher.mode, dispatcher.keys, batch)) == frozen
    key = decision.descriptor
    if key is None:
        assert decision.reason.startswith("eager")
        assert (decision.pad_tokens, decision.pad_reqs) == (0, 0)
        usable = [k for k in dispatcher.keys if admits(k, batch, is_decode_key(dispatcher, k))]
        assert usable == []
        return
    assert key in dispatcher.keys
    assert admits(key, batch, decode_key=decision.reason is DispatchReason.DECODE)
    assert decision.pad_tokens == key.num_tokens - batch.num_tokens >= 0
    assert decision.pad_reqs == (0 if key.num_reqs is None else key.num_reqs - batch.num_reqs) >= 0
    part = dispatcher.mode.decode_mode if batch.decode_only else dispatcher.mode.mixed_mode
    assert key.mode is part or (part is FULL and key.mode is dispatcher.mode.mixed_mode)


@settings(max_examples=200, deadline=None)
@given(dispatchers(), batches())
def test_the_smallest_fitting_key_of_the_preferred_kind_is_chosen(
    dispatcher: CudagraphDispatcher, batch: UnpaddedBatch
) -> None:
    decision = dispatcher.dispatch(batch)
    key = decision.descriptor
    if key is None:
        return
    usable = [k for k in dispatcher.keys if admits(k, batch, is_decode_key(dispatcher, k))]
    if decision.reason is DispatchReason.DECODE:
        usable = [k for k in usable if k.uniform_query_len is not None]
    elif decision.reason is DispatchReason.MIXED:
        usable = [k for k in usable if k.mode is FULL and k.uniform_query_len is None]
    elif decision.reason is DispatchReason.PIECEWISE:
        assert [k for k in usable if k.mode is FULL] == []
    assert key.num_tokens == min(k.num_tokens for k in usable if k.mode is key.mode)


@settings(max_examples=100, deadline=None)
@given(dispatchers(), batches(), st.data())
def test_only_ready_keys_are_chosen(dispatcher: CudagraphDispatcher, batch: UnpaddedBatch, data: st.DataObject) -> None:
    ready = {key for key in dispatcher.keys if data.draw(st.booleans())}
    decision = dispatcher.dispatch(batch, ready)
    assert decision.descriptor is None or decision.descriptor in ready
    if decision.descriptor is None and dispatcher.dispatch(batch).descriptor is not None:
        assert decision.reason is DispatchReason.NOT_CAPTURED


def first_failure(key: BatchExecutionDescriptor, batch: UnpaddedBatch, decode_key: bool) -> DispatchReason:
    """Return the first constraint of a key that the batch violates, independently of the dispatcher."""
    checks = (
        (DispatchReason.HAS_PREFILL, batch.decode_only or not decode_key),
        (DispatchReason.VARIANT, key.variant == batch.variant),
        (DispatchReason.QUERY_LEN, key.uniform_query_len in (None, batch.query_len)),
        (
            DispatchReason.QUERY_LEN,
            not decode_key or key.max_query_len is None or batch.max_query_len <= key.max_query_len,
        ),
        (DispatchReason.NUM_REQS, key.num_reqs is None or batch.num_reqs <= key.num_reqs),
        (DispatchReason.NUM_TOKENS, batch.num_tokens <= key.num_tokens),
    )
    return next((why for why, holds in checks if not holds), DispatchReason.NOT_CAPTURED)


@settings(max_examples=300, deadline=None)
@given(dispatchers(), batches(), st.data())
def test_the_reason_is_the_constraint_violated_at_the_nearest_key(
    dispatcher: CudagraphDispatcher, batch: UnpaddedBatch, data: st.DataObject
) -> None:
    """The test compares with all keys. The dispatcher looks only at the largest key of each group."""
    ready = {key for key in dispatcher.keys if data.draw(st.booleans())} if data.draw(st.booleans()) else None
    decision = dispatcher.dispatch(batch, ready)
    if decision.descriptor is not None:
        return
    order = [DispatchReason.NO_GRAPHS, *list(DispatchReason)[list(DispatchReason).index(DispatchReason.HAS_PREFILL) :]]
    reasons = [first_failure(key, batch, is_decode_key(dispatcher, key)) for key in dispatcher.keys]
    assert decision.reason is max(reasons, key=order.index, default=DispatchReason.NO_GRAPHS)


@settings(max_examples=100, deadline=None)
@given(dispatchers(), st.integers(1, 50), st.integers(1, 5), st.booleans())
def test_coverage_equals_the_decisions(
    dispatcher: CudagraphDispatcher, max_reqs: int, length: int, decode_only: bool
) -> None:
    coverage = dispatcher.coverage(max_reqs, length, decode_only=decode_only)
    padding = []
    for n in range(1, max_reqs + 1):
        decision = dispatcher.dispatch(UnpaddedBatch(n, n * length, length, length, decode_only))
        spans = [each for each in coverage.ranges if each.first <= n <= each.last]
        assert [(span.descriptor, span.reason) for span in spans] == [(decision.descriptor, decision.reason)]
        if decision.descriptor is not None:
            padding.append(decision.pad_tokens / decision.descriptor.num_tokens)
    assert sum(each.num_sizes for each in coverage.ranges) == max_reqs
    assert coverage.worst_padding == max(padding, default=0.0)
    assert coverage.mean_padding == pytest.approx(sum(padding) / len(padding) if padding else 0.0)
    assert len(coverage.table().splitlines()) == len(coverage.ranges) + 2


@settings(max_examples=100, deadline=None)
@given(dispatchers())
def test_capture_order(dispatcher: CudagraphDispatcher) -> None:
    modes = [key.mode for key in dispatcher.keys]
    assert modes == sorted(modes, key=lambda mode: mode is PIECEWISE), "decode graphs first"
    for mode in (FULL, PIECEWISE):
        sizes = [key.num_tokens for key in dispatcher.keys if key.mode is mode]
        assert sizes == sorted(sizes, reverse=True)
    assert len(set(dispatcher.keys)) == len(dispatcher.keys)
    ordered = sorted(dispatcher.keys)
    assert all(a < b for a, b in itertools.pairwise(ordered))


def test_equal_prefill_chunks_get_no_decode_graph() -> None:
    dispatcher = CudagraphDispatcher.make(CudaGraphMode.FULL_AND_PIECEWISE, [4, 8], query_lens=(1, 2))
    decode = dispatcher.dispatch(UnpaddedBatch(3, 6, 2, 2, decode_only=True))
    prefill = dispatcher.dispatch(UnpaddedBatch(3, 6, 2, 2, decode_only=False))
    assert decode == DispatchDecision(BatchExecutionDescriptor(FULL, 8, 4, 2, 2), DispatchReason.DECODE, 2, 1)
    assert prefill == DispatchDecision(BatchExecutionDescriptor(PIECEWISE, 8), DispatchReason.PIECEWISE, 2, 0)


def test_capture_sizes_are_rounded_to_whole_rows_and_lowered_to_the_limit() -> None:
    dispatcher = CudagraphDispatcher.make(
        CudaGraphMode.FULL_DECODE_ONLY, [1, 2, 4, 8, 16], max_num_reqs=3, query_lens=(4,)
    )
    assert [(key.num_reqs, key.num_tokens) for key in dispatcher.keys] == [(3, 12), (2, 8), (1, 4)]
    assert dispatcher.coverage(3, 4).gaps == ()
    rounded = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [6], query_lens=(4,))
    assert [(key.num_reqs, key.num_tokens) for key in rounded.keys] == [(2, 8)]


@pytest.mark.parametrize(
    ("mode", "batch", "why"),
    [
        (CudaGraphMode.NONE, UnpaddedBatch(1, 1, 1, 1, True), DispatchReason.NO_GRAPHS),
        (CudaGraphMode.FULL_DECODE_ONLY, UnpaddedBatch(1, 3, 3, 3, False), DispatchReason.HAS_PREFILL),
        (CudaGraphMode.FULL, UnpaddedBatch(1, 1, 1, 1, True, (9,)), DispatchReason.VARIANT),
        (CudaGraphMode.FULL_DECODE_ONLY, UnpaddedBatch(2, 4, 2, 2, True), DispatchReason.QUERY_LEN),
        (CudaGraphMode.FULL_DECODE_ONLY, UnpaddedBatch(9, 9, 1, 1, True), DispatchReason.NUM_REQS),
        (CudaGraphMode.FULL, UnpaddedBatch(9, 9, 1, 1, True), DispatchReason.NUM_REQS),
        (CudaGraphMode.FULL, UnpaddedBatch(2, 30, 15, 15, False), DispatchReason.NUM_TOKENS),
        (CudaGraphMode.PIECEWISE, UnpaddedBatch(2, 30, 15, 15, False), DispatchReason.NUM_TOKENS),
    ],
)
def test_an_eager_batch_names_the_violated_constraint(
    mode: CudaGraphMode, batch: UnpaddedBatch, why: DispatchReason
) -> None:
    dispatcher = CudagraphDispatcher.make(mode, [4, 8], max_num_reqs=8)
    assert dispatcher.dispatch(batch) == DispatchDecision(None, why)


def test_coverage_shows_gaps() -> None:
    dispatcher = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [2, 4])
    coverage = dispatcher.coverage(6, 1)
    assert [(gap.first, gap.last, gap.reason) for gap in coverage.gaps] == [(5, 6, DispatchReason.NUM_REQS)]
    assert coverage.worst_padding == 0.5
    assert coverage.table().splitlines() == [
        "    requests  runs on",
        "         1-2  FULL 2 tokens, 2 requests, 1 each",
        "         3-4  FULL 4 tokens, 4 requests, 1 each",
        "         5-6  eager: more requests than the largest graph",
        "4 of 6 sizes at 1 tokens per request on a graph; padding 18.8% on average, 50.0% at worst",
    ]


def test_coverage_of_a_variant() -> None:
    dispatcher = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [4], variants=[("rank", 8)])
    covered, missing = dispatcher.coverage(4, 1, variant=("rank", 8)), dispatcher.coverage(4, 1)
    assert [each.descriptor for each in covered.ranges] == [*dispatcher.keys]
    assert [(each.last, each.reason) for each in missing.ranges] == [(4, DispatchReason.VARIANT)]


def test_a_dispatcher_without_capture_sizes_has_no_graphs() -> None:
    decision = CudagraphDispatcher.make(FULL, []).dispatch(UnpaddedBatch(1, 1, 1, 1, True))
    assert decision == DispatchDecision(None, DispatchReason.NO_GRAPHS)
    assert str(decision.reason) == "eager: the dispatcher has no graphs"


def test_decode_mode_and_mixed_mode() -> None:
    none = CudaGraphMode.NONE
    assert {mode: (mode.decode_mode, mode.mixed_mode) for mode in CudaGraphMode} == {
        none: (none, none),
        PIECEWISE: (PIECEWISE, PIECEWISE),
        FULL: (FULL, FULL),
        CudaGraphMode.FULL_DECODE_ONLY: (FULL, none),
        CudaGraphMode.FULL_AND_PIECEWISE: (FULL, PIECEWISE),
    }


@pytest.mark.parametrize(
    ("mode", "support", "query_len", "expected", "reason"),
    [
        ("FULL", 3, 4, "FULL", None),
        ("FULL", 2, 4, "FULL_AND_PIECEWISE", "a full graph may hold rows of equal length, and the mode asks"),
        ("FULL", 1, 1, "FULL_AND_PIECEWISE", "rows of one token, and the mode asks for every batch"),
        ("FULL", 1, 2, "PIECEWISE", "rows of one token, and decode rows have up to 2 tokens"),
        ("FULL", 0, 1, "PIECEWISE", "a full graph may hold no attention, and decode rows have up to 1"),
        ("FULL_AND_PIECEWISE", 2, 4, "FULL_AND_PIECEWISE", None),
        ("FULL_AND_PIECEWISE", 1, 4, "PIECEWISE", "decode rows have up to 4 tokens"),
        ("FULL_AND_PIECEWISE", 1, 1, "FULL_AND_PIECEWISE", None),
        ("FULL_DECODE_ONLY", 1, 1, "FULL_DECODE_ONLY", None),
        ("FULL_DECODE_ONLY", 0, 1, "PIECEWISE", "a full graph may hold no attention"),
        ("PIECEWISE", 0, 4, "PIECEWISE", None),
        ("NONE", 0, 4, "NONE", None),
    ],
)
def test_a_changed_mode_has_a_reason(
    mode: str, support: int, query_len: int, expected: str, reason: str | None
) -> None:
    resolved, sentence = CudaGraphMode(mode).resolve(support, query_len=query_len)
    assert resolved is CudaGraphMode(expected)
    if reason is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert sentence.startswith(f"{mode} became {expected}: ")
        assert reason in sentence


@pytest.mark.parametrize("mode", CudaGraphMode)
@pytest.mark.parametrize("query_len", [1, 2])
def test_a_resolved_mode_resolves_to_itself(mode: CudaGraphMode, query_len: int) -> None:
    for support in range(4):
        once, sentence = mode.resolve(support, query_len=query_len)
        again = once.resolve(support, query_len=query_len)
        assert again == (once, None)
        assert (sentence is None) == (once is mode)
        assert once.mixed_mode is not FULL or support == 3
        assert once.decode_mode is not FULL or support >= query_len


def test_counter() -> None:
    dispatcher = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [4])
    counter = DispatchCounter()
    for num_reqs in (3, 4, 9):
        counter.count(dispatcher.dispatch(UnpaddedBatch(num_reqs, num_reqs, 1, 1, True)))
    assert dict(counter.by_reason) == {DispatchReason.DECODE: 2, DispatchReason.NUM_REQS: 1}
    assert (counter.total, counter.num_graph_tokens, counter.num_pad_tokens) == (3, 8, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: UnpaddedBatch(0, 1, 1, 1, True), r"num_reqs=0 must be in \[1, num_tokens=1\]"),
        (lambda: UnpaddedBatch(2, 1, None, 1, True), "num_reqs=2"),
        (lambda: UnpaddedBatch(2, 9, None, 4, True), "max_query_len=4 is impossible"),
        (lambda: UnpaddedBatch(2, 3, 1, 2, True), "query_len=1"),
        (lambda: CudagraphDispatcher.make(FULL, [0]), "must be at least 1, got 0"),
        (lambda: CudagraphDispatcher.make(FULL, [1], max_num_reqs=-1), "got -1"),
        (lambda: CudagraphDispatcher.make(FULL, [1]).coverage(0, 1), "max_num_reqs=0"),
        (lambda: FULL.resolve(4), r"support=4 must be in \[0, 3\]"),
        (lambda: FULL.resolve(3, query_len=0), "query_len=0 must be at least 1"),
        (lambda: BatchExecutionDescriptor(CudaGraphMode.NONE, 1), "must be PIECEWISE or FULL"),
        (lambda: BatchExecutionDescriptor(PIECEWISE, 0), "num_tokens=0"),
        (lambda: BatchExecutionDescriptor(FULL, 4), "which fixes both"),
        (lambda: BatchExecutionDescriptor(FULL, 4, 5, None, 4), "num_reqs=5"),
        (lambda: BatchExecutionDescriptor(FULL, 5, 2, 2, 2), "uniform_query_len=2"),
    ],
)
def test_bad_input(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=match):
        make()
