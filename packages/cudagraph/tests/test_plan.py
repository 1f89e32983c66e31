"""The plan: every decision keeps its key's promises, and every refusal has its reason."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.cudagraph import (
    Ask,
    BatchExecutionDescriptor,
    CapturePlan,
    CudaGraphMode,
    Decision,
    DecisionCounter,
    Why,
)

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE


@st.composite
def plans(draw: st.DrawFn) -> CapturePlan:
    return CapturePlan.make(
        draw(st.sampled_from(CudaGraphMode)),
        draw(st.lists(st.integers(1, 70), max_size=6)),
        max_num_reqs=draw(st.none() | st.integers(1, 40)),
        max_num_tokens=draw(st.none() | st.integers(1, 80)),
        query_lens=draw(st.lists(st.integers(1, 5), max_size=2, unique=True)),
        variants=draw(st.sampled_from([((),), ((), ("lora", 2)), (("lora", 2),)])),
    )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    if draw(st.booleans()):
        lens = [draw(st.integers(1, 6))] * draw(st.integers(1, 30))
    else:
        lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    uniform = lens[0] if len(set(lens)) == 1 else None
    variant = draw(st.sampled_from([(), ("lora", 2), (7,)]))
    return Ask(len(lens), sum(lens), uniform, max(lens), draw(st.booleans()), variant)


def admits(key: BatchExecutionDescriptor, ask: Ask, decode_key: bool) -> bool:
    """The contract of a key, written down a second time."""
    return (
        (ask.decode_only or not decode_key)
        and key.variant == ask.variant
        and key.num_tokens >= ask.num_tokens
        and (key.num_reqs is None or key.num_reqs >= ask.num_reqs)
        and (key.uniform_query_len is None or key.uniform_query_len == ask.query_len)
        and (key.max_query_len is None or key.max_query_len >= ask.max_query_len)
    )


def is_decode_key(plan: CapturePlan, key: BatchExecutionDescriptor) -> bool:
    return key.uniform_query_len is not None


@settings(max_examples=300, deadline=None)
@given(plans(), asks())
def test_f1_f3_a_decision_satisfies_its_key(plan: CapturePlan, ask: Ask) -> None:
    frozen = pickle.dumps((plan.mode, plan.keys, ask))
    decision = plan.decide(ask)
    assert decision == plan.decide(ask)
    assert pickle.dumps((plan.mode, plan.keys, ask)) == frozen
    key = decision.descriptor
    if key is None:
        assert decision.why.startswith("eager")
        assert (decision.pad_tokens, decision.pad_reqs) == (0, 0)
        usable = [k for k in plan.keys if admits(k, ask, is_decode_key(plan, k))]
        assert usable == []
        return
    assert key in plan.keys
    assert admits(key, ask, decode_key=decision.why is Why.DECODE)
    assert decision.pad_tokens == key.num_tokens - ask.num_tokens >= 0
    assert decision.pad_reqs == (0 if key.num_reqs is None else key.num_reqs - ask.num_reqs) >= 0
    part = plan.mode.decode if ask.decode_only else plan.mode.mixed
    assert key.mode is part or (part is FULL and key.mode is plan.mode.mixed)


@settings(max_examples=200, deadline=None)
@given(plans(), asks())
def test_f1_the_smallest_admissible_key_of_the_best_kind(plan: CapturePlan, ask: Ask) -> None:
    decision = plan.decide(ask)
    key = decision.descriptor
    if key is None:
        return
    usable = [k for k in plan.keys if admits(k, ask, is_decode_key(plan, k))]
    if decision.why is Why.DECODE:
        usable = [k for k in usable if k.uniform_query_len is not None]
    elif decision.why is Why.MIXED:
        usable = [k for k in usable if k.mode is FULL and k.uniform_query_len is None]
    elif decision.why is Why.PIECEWISE:
        assert [k for k in usable if k.mode is FULL] == []
    assert key.num_tokens == min(k.num_tokens for k in usable if k.mode is key.mode)


@settings(max_examples=100, deadline=None)
@given(plans(), asks(), st.data())
def test_f1_ready_limits_the_choice(plan: CapturePlan, ask: Ask, data: st.DataObject) -> None:
    ready = {key for key in plan.keys if data.draw(st.booleans())}
    decision = plan.decide(ask, ready)
    assert decision.descriptor is None or decision.descriptor in ready
    if decision.descriptor is None and plan.decide(ask).descriptor is not None:
        assert decision.why is Why.NOT_READY


def first_failure(key: BatchExecutionDescriptor, ask: Ask, decode_key: bool) -> Why:
    """The first constraint of a key that the batch breaks, written down a second time; NOT_READY for none."""
    checks = (
        (Why.STATE, ask.decode_only or not decode_key),
        (Why.VARIANT, key.variant == ask.variant),
        (Why.QUERY_LEN, key.uniform_query_len in (None, ask.query_len)),
        (
            Why.QUERY_LEN,
            not decode_key or key.max_query_len is None or ask.max_query_len <= key.max_query_len,
        ),
        (Why.NUM_REQS, key.num_reqs is None or ask.num_reqs <= key.num_reqs),
        (Why.NUM_TOKENS, ask.num_tokens <= key.num_tokens),
    )
    return next((why for why, holds in checks if not holds), Why.NOT_READY)


@settings(max_examples=300, deadline=None)
@given(plans(), asks(), st.data())
def test_the_reason_is_the_constraint_that_failed_at_the_nearest_key(
    plan: CapturePlan, ask: Ask, data: st.DataObject
) -> None:
    """Over all keys, although only the largest of each chain is looked at."""
    ready = {key for key in plan.keys if data.draw(st.booleans())} if data.draw(st.booleans()) else None
    decision = plan.decide(ask, ready)
    if decision.descriptor is not None:
        return
    order = [Why.NO_GRAPHS, *list(Why)[list(Why).index(Why.STATE) :]]
    reasons = [first_failure(key, ask, is_decode_key(plan, key)) for key in plan.keys]
    assert decision.why is max(reasons, key=order.index, default=Why.NO_GRAPHS)


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 50), st.integers(1, 5), st.booleans())
def test_f2_coverage_agrees_with_decide(
    plan: CapturePlan, max_reqs: int, length: int, decode_only: bool
) -> None:
    coverage = plan.coverage(max_reqs, length, decode_only=decode_only)
    wastes = []
    for n in range(1, max_reqs + 1):
        decision = plan.decide(Ask(n, n * length, length, length, decode_only))
        spans = [span for span in coverage.spans if span.first <= n <= span.last]
        assert [(span.descriptor, span.why) for span in spans] == [(decision.descriptor, decision.why)]
        if decision.descriptor is not None:
            wastes.append(decision.pad_tokens / decision.descriptor.num_tokens)
    assert sum(span.num_reqs for span in coverage.spans) == max_reqs
    assert coverage.worst_waste == max(wastes, default=0.0)
    assert coverage.mean_waste == pytest.approx(sum(wastes) / len(wastes) if wastes else 0.0)
    assert len(coverage.table().splitlines()) == len(coverage.spans) + 2


@settings(max_examples=100, deadline=None)
@given(plans())
def test_capture_order(plan: CapturePlan) -> None:
    modes = [key.mode for key in plan.keys]
    assert modes == sorted(modes, key=lambda mode: mode is PIECEWISE), "decode graphs matter most"
    for mode in (FULL, PIECEWISE):
        sizes = [key.num_tokens for key in plan.keys if key.mode is mode]
        assert sizes == sorted(sizes, reverse=True)
    assert len(set(plan.keys)) == len(plan.keys)
    ordered = sorted(plan.keys)
    assert all(a < b for a, b in itertools.pairwise(ordered))


def test_f1_equal_prefill_chunks_are_no_decode_batch() -> None:
    plan = CapturePlan.make(CudaGraphMode.FULL_AND_PIECEWISE, [4, 8], query_lens=(1, 2))
    decode = plan.decide(Ask(3, 6, 2, 2, decode_only=True))
    prefill = plan.decide(Ask(3, 6, 2, 2, decode_only=False))
    assert decode == Decision(BatchExecutionDescriptor(FULL, 8, 4, 2, 2), Why.DECODE, 2, 1)
    assert prefill == Decision(BatchExecutionDescriptor(PIECEWISE, 8), Why.PIECEWISE, 2, 0)


def test_f1_sizes_become_whole_rows_and_keep_the_maximum() -> None:
    plan = CapturePlan.make(CudaGraphMode.FULL_DECODE_ONLY, [1, 2, 4, 8, 16], max_num_reqs=3, query_lens=(4,))
    assert [(key.num_reqs, key.num_tokens) for key in plan.keys] == [(3, 12), (2, 8), (1, 4)]
    assert plan.coverage(3, 4).gaps == ()
    rounded = CapturePlan.make(CudaGraphMode.FULL_DECODE_ONLY, [6], query_lens=(4,))
    assert [(key.num_reqs, key.num_tokens) for key in rounded.keys] == [(2, 8)]


@pytest.mark.parametrize(
    ("mode", "ask", "why"),
    [
        (CudaGraphMode.NONE, Ask(1, 1, 1, 1, True), Why.NO_GRAPHS),
        (CudaGraphMode.FULL_DECODE_ONLY, Ask(1, 3, 3, 3, False), Why.STATE),
        (CudaGraphMode.FULL, Ask(1, 1, 1, 1, True, (9,)), Why.VARIANT),
        (CudaGraphMode.FULL_DECODE_ONLY, Ask(2, 4, 2, 2, True), Why.QUERY_LEN),
        (CudaGraphMode.FULL_DECODE_ONLY, Ask(9, 9, 1, 1, True), Why.NUM_REQS),
        (CudaGraphMode.FULL, Ask(9, 9, 1, 1, True), Why.NUM_REQS),
        (CudaGraphMode.FULL, Ask(2, 30, 15, 15, False), Why.NUM_TOKENS),
        (CudaGraphMode.PIECEWISE, Ask(2, 30, 15, 15, False), Why.NUM_TOKENS),
    ],
)
def test_eager_names_the_failed_constraint(mode: CudaGraphMode, ask: Ask, why: Why) -> None:
    plan = CapturePlan.make(mode, [4, 8], max_num_reqs=8)
    assert plan.decide(ask) == Decision(None, why)


def test_f2_gaps_are_shown() -> None:
    plan = CapturePlan.make(CudaGraphMode.FULL_DECODE_ONLY, [2, 4])
    coverage = plan.coverage(6, 1)
    assert [(gap.first, gap.last, gap.why) for gap in coverage.gaps] == [(5, 6, Why.NUM_REQS)]
    assert coverage.worst_waste == 0.5
    assert coverage.table().splitlines() == [
        "    requests  runs on",
        "         1-2  FULL 2 tokens, 2 requests, 1 each",
        "         3-4  FULL 4 tokens, 4 requests, 1 each",
        "         5-6  eager: more requests than the largest graph",
        "4 of 6 sizes at 1 tokens per request on a graph; padding 18.8% on average, 50.0% at worst",
    ]


def test_a_plan_without_sizes_says_that_it_has_no_graphs() -> None:
    """Not that the mode captures nothing: it would."""
    decision = CapturePlan.make(FULL, []).decide(Ask(1, 1, 1, 1, True))
    assert decision == Decision(None, Why.NO_GRAPHS)
    assert str(decision.why) == "eager: the plan has no graphs"


def test_mode_parts() -> None:
    none = CudaGraphMode.NONE
    assert {mode: (mode.decode, mode.mixed) for mode in CudaGraphMode} == {
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
def test_a_mode_is_never_changed_silently(
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
        assert once.mixed is not FULL or support == 3
        assert once.decode is not FULL or support >= query_len


def test_counter() -> None:
    plan = CapturePlan.make(CudaGraphMode.FULL_DECODE_ONLY, [4])
    counter = DecisionCounter()
    for num_reqs in (3, 4, 9):
        counter.count(plan.decide(Ask(num_reqs, num_reqs, 1, 1, True)))
    assert dict(counter.by_why) == {Why.DECODE: 2, Why.NUM_REQS: 1}
    assert (counter.total, counter.num_graph_tokens, counter.num_pad_tokens) == (3, 8, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Ask(0, 1, 1, 1, True), r"num_reqs=0 must be in \[1, num_tokens=1\]"),
        (lambda: Ask(2, 1, None, 1, True), "num_reqs=2"),
        (lambda: Ask(2, 9, None, 4, True), "max_query_len=4 cannot be"),
        (lambda: Ask(2, 3, 1, 2, True), "query_len=1"),
        (lambda: CapturePlan.make(FULL, [0]), "must be at least 1, got 0"),
        (lambda: CapturePlan.make(FULL, [1], max_num_reqs=-1), "got -1"),
        (lambda: CapturePlan.make(FULL, [1]).coverage(0, 1), "max_reqs=0"),
        (lambda: FULL.resolve(4), r"support=4 must be in \[0, 3\]"),
        (lambda: FULL.resolve(3, query_len=0), "query_len=0 must be at least 1"),
        (lambda: BatchExecutionDescriptor(CudaGraphMode.NONE, 1), "must be PIECEWISE or FULL"),
        (lambda: BatchExecutionDescriptor(PIECEWISE, 0), "num_tokens=0"),
        (lambda: BatchExecutionDescriptor(FULL, 4), "both are baked in"),
        (lambda: BatchExecutionDescriptor(FULL, 4, 5, None, 4), "num_reqs=5"),
        (lambda: BatchExecutionDescriptor(FULL, 5, 2, 2, 2), "uniform_query_len=2"),
    ],
)
def test_bad_input(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=match):
        make()
