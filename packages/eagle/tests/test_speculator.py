"""The chain drafter against the head run from scratch: drafts, caches, bounds, limits, metadata and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph import (
    CudagraphDispatcher,
    CudaGraphMode,
    DispatchReason,
    RankStep,
    RecordedBackend,
    ReplayChecks,
    dispatch_jointly,
)
from bateleur.cudagraph import get_backend as get_graph_backend
from bateleur.eagle.borrow import BorrowError
from bateleur.eagle.buffers import DraftBuffers, DraftCache
from bateleur.eagle.conformance.toy_engine import DTYPE, HEAD_DIM, ToyRequest, ToyTarget, paged_caches
from bateleur.eagle.drafter import DraftContext, TargetNeeds
from bateleur.eagle.managers import DraftGraphs
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.metadata import (
    BatchLimits,
    BuildPhase,
    CommonAttentionMetadata,
    KVCacheGroup,
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    get_backend,
)
from eagle_doubles.engine import GraphEngine
from eagle_doubles.heads import MarkovHead, ToyHead

K = 3
Step = tuple[dict[int, int], int | None]
SCHEDULE: tuple[Step, ...] = (
    # (tokens of each row, drafts asked for): chunks of prompts beside verifying rows, rows that come late, K = 0
    ({0: 3}, None),
    ({0: 4}, None),
    ({0: 4, 1: 5}, None),
    ({1: 4, 0: 4, 2: 2}, None),
    ({0: 4, 1: 4, 2: 4}, 0),
    ({0: 1, 1: 1, 2: 3}, 0),
    ({0: 1, 1: 1, 2: 1}, 2),
    ({2: 3, 0: 3, 1: 2}, None),
    ({0: 4, 1: 4, 2: 4}, 1),
    ({1: 2, 0: 2, 2: 2}, None),
    ({1: 4, 0: 4, 2: 4}, None),
)


def backend_named(name: str) -> Any:
    return get_backend(name, device="cpu", dtype=DTYPE, head_dim=HEAD_DIM)


def make(
    head: Callable[[ToyTarget], Any] = ToyHead,
    *,
    k: int = K,
    name: str = "torch",
    attention: Any = None,
    limits: BatchLimits = BatchLimits(4, 32, 40),  # noqa: B008 (frozen)
    graphs: DraftGraphs | None = None,
    mode: str | None = None,
    target: ToyTarget | None = None,
    device: str = "cpu",
) -> GraphEngine:
    """An engine with three requests and a drafter; with `mode`, target and drafter are captured."""
    target = target or ToyTarget()
    made, backend = head(target), backend_named(name)
    engine = GraphEngine(target, backend, limits, lookahead=max(k - 1, 0), device=device)
    engine.drafter = EagleSpeculator(
        made,
        DraftCache(paged_caches(made.spec.num_layers, engine.num_blocks, engine.block_size, device), engine.groups),
        attention or backend,
        limits,
        k,
        graphs=graphs,
    )
    if mode is not None:
        plan = CudagraphDispatcher.make(
            CudaGraphMode[mode], (4, 8, 16), max_num_reqs=4, max_num_tokens=32, query_lens=(1 + k,)
        )
        name = "recorded" if device == "cpu" else "cuda"
        engine.drafter.capture(engine.capture(plan, get_graph_backend(name, device)))
    engine.add(0, [1, 2, 3, 4, 5], seed=7, temperature=0.8)
    engine.add(1, [3, 1, 18, 0, 9], seed=2)
    engine.add(2, [5, 5, 5, 6], seed=3, temperature=1.5)
    return engine


def num_builds(engine: GraphEngine) -> int:
    """Metadata built so far, for all passes."""
    assert engine.drafter is not None
    return engine.drafter.steps.generation + engine.drafter.draft_prefill_builds


def recorded(fuse: bool = True) -> DraftGraphs:
    return DraftGraphs(RecordedBackend(), (1, 2, 4), fuse=fuse, checks=ReplayChecks.PARANOID)


def assert_caches_are_exact(engine: GraphEngine, request: ToyRequest) -> None:
    """F1: what the drafter holds of the computed tokens is what the head makes of them from scratch."""
    assert engine.drafter is not None
    _, held = engine.from_scratch(request, 0)
    for layer in range(len(engine.drafter.kv)):
        for paged, dense in zip(engine.draft_cache(request, layer, request.computed), held.kv[layer], strict=True):
            torch.testing.assert_close(paged, dense)


def run(engine: GraphEngine, schedule: tuple[Step, ...] = SCHEDULE, *, check: bool = True) -> list[Tensor]:
    """The proposals of a schedule; each row's drafts and caches checked against the head from scratch."""
    assert engine.drafter is not None
    proposals = []
    for work, asked in schedule:
        proposal = engine.step(work, asked)
        proposals.append(proposal)
        k = engine.drafter.num_speculative_tokens
        num = k if asked is None else asked
        assert proposal.shape == (len(work), k)
        for drafts, row in zip(proposal.tolist(), work, strict=True):
            request = engine.requests[row]
            if check:
                expected, _ = engine.from_scratch(request, num)
                assert drafts == expected + [-1] * (k - num), (work, row)
                assert_caches_are_exact(engine, request)
    return proposals


# --- the proposals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize(
    "head",
    [
        ToyHead,
        lambda target: ToyHead(target, num_layers=2, target_ids=(17, 2, 3, 5, 7, 11, 13)),
        lambda target: ToyHead(target, TargetNeeds(taps=(0,)), hidden_size=9),
    ],
    ids=["one-layer", "two-layers-own-vocabulary", "one-tap"],
)
def test_f1_f2_drafts_and_caches_equal_the_head_from_scratch(head: Callable[[ToyTarget], Any], name: str) -> None:
    engine = make(head, name=name)
    run(engine)
    for request in engine.requests.values():
        assert request.tokens == engine.plain(request, len(request.tokens) - request.prompt_len)


def test_drafts_are_accepted_and_rejected_in_these_tests() -> None:
    engine = make()
    valid = []
    for work, asked in SCHEDULE * 2:
        engine.step(work, asked)
        assert engine.context is not None
        valid += [(tokens, left) for tokens, left in zip(work.values(), engine.context.num_valid.tolist(), strict=True)]
    assert any(left < tokens for tokens, left in valid)
    assert any(left > 1 for tokens, left in valid[8:])


def test_f4_what_lies_behind_the_computed_tokens_is_never_read() -> None:
    clean, engine = make(), make()
    assert engine.drafter is not None
    for work, asked in SCHEDULE:
        assert torch.equal(clean.step(work, asked), engine.step(work, asked))
        for k_cache, v_cache in engine.drafter.kv:
            for request in engine.requests.values():
                for position in range(request.computed, engine.limits.max_model_len):
                    block = engine.tables[request.row, position // engine.block_size]
                    for cache in (k_cache, v_cache):
                        cache[block, position % engine.block_size] = torch.nan


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_g_a_head_with_the_targets_law_drafts_what_the_target_draws(temperature: float) -> None:
    """Noise is shared by seed and position, so all K drafts are accepted at any temperature."""
    target = ToyTarget(num_layers=0)
    target.position_embedding.zero_()
    table = target.logits(torch.tanh(target.embedding))
    engine = make(lambda _: MarkovHead(table), target=target)
    for request in engine.requests.values():
        request.temperature = temperature
        engine.step({request.row: request.prompt_len})
    for _ in range(4):
        engine.step(dict.fromkeys(range(3), 1 + K))
        assert engine.context is not None
        assert engine.context.num_valid.tolist() == [1 + K] * 3


def test_what_is_returned_outlives_the_next_proposal() -> None:
    engine = make()
    first = engine.step({0: 5})
    kept = first.clone()
    engine.step({1: 5})
    assert torch.equal(first, kept)


def test_a_nan_of_the_head_is_no_draft() -> None:
    engine = make()
    assert engine.drafter is not None
    engine.drafter.head.head[:, 4] = torch.nan  # type: ignore[attr-defined]
    assert engine.step({0: 5}).tolist() == [[-1] * K]


# --- C: geometry and padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_c1_poison_in_padded_rows_changes_nothing(mode: str) -> None:
    clean, engine = make(), make(graphs=recorded(), mode=mode)
    engine.spoil_padding = True
    assert engine.drafter is not None
    for work, asked in SCHEDULE:
        for name in ("hidden", "temperature", "seeds", "block_table"):
            tensor = getattr(engine.drafter.inputs, name)
            tensor.fill_(torch.nan if tensor.is_floating_point() else 2**30)
        engine.drafter.inputs.poison()
        assert torch.equal(clean.step(work, asked), engine.step(work, asked))
    assert engine.num_graph_steps


def test_c1_rows_of_a_larger_step_leave_nothing_behind() -> None:
    engine = make()
    assert engine.drafter is not None
    engine.step({0: 5, 1: 5, 2: 4})
    engine.step({1: 2})
    x = engine.drafter.inputs
    assert not x.block_table[1:].any()
    assert not x.seeds[1:].any()
    assert not x.temperature[1:].any()
    assert (x.tokens[1:] == -1).all()
    assert (x.slot_mapping[1:] == -1).all()


def test_only_rows_that_an_earlier_batch_wrote_are_cleared() -> None:
    x = DraftBuffers(BatchLimits(6, 12, 8), 2, "cpu", max_blocks=3)

    def launched(rows: int, **options: Any) -> dict[str, int]:
        ones = torch.ones(rows, dtype=torch.int64)
        with Operators() as run:
            x.set_rows(ones, ones.float(), ones.int()[:, None].expand(-1, 3), **options)
        return {name: run.names.count(name) for name in ("copy_", "fill_")}

    def filled() -> list[int]:
        return [int(each.count_nonzero()) for each in (x.seeds, x.temperature, x.block_table[:, 0])]

    assert launched(4) == launched(4) == {"copy_": 3, "fill_": 0}, "a steady batch"
    assert launched(2) == {"copy_": 3, "fill_": 3}
    assert filled() == [2] * 3
    assert launched(1, clears=False) == launched(5, clears=False) == {"copy_": 3, "fill_": 0}, "in a graph"
    assert (launched(3), filled()) == ({"copy_": 3, "fill_": 3}, [3] * 3)
    x.note_rows(6)
    x.seeds.fill_(7)
    assert (launched(5), filled()) == ({"copy_": 3, "fill_": 3}, [5] * 3)
    x.poison()
    assert (launched(5), filled()) == ({"copy_": 3, "fill_": 3}, [5] * 3)


def test_c4_no_draft_reaches_beyond_the_longest_request() -> None:
    """The target computes a draft of index i at position i, so the last useful index is max_model_len - 1."""
    engine = make(limits=BatchLimits(4, 32, 16), target=ToyTarget(max_positions=16))
    assert engine.drafter is not None
    request, k_cache = engine.requests[1], engine.drafter.kv[0][0]
    engine.step({1: 5})
    while request.computed < 15:
        room = 16 - request.computed
        proposal = engine.step({1: min(1 + K, room)})[0].tolist()
        expected, _ = engine.from_scratch(request, K)
        useful = max(0, min(K, 16 - (request.computed + 1)))
        assert proposal == expected[:useful] + [-1] * (K - useful)
        assert_caches_are_exact(engine, request)
    others = [row for row in range(4) if row != 1]
    assert k_cache[torch.from_numpy(engine.tables[others]).long()].isnan().all(), "other rows' blocks"
    assert not k_cache[0].any(), "the null block"


def test_c4_a_head_for_fewer_positions_stops_drafting_there() -> None:
    engine = make(lambda target: ToyHead(target, max_positions=10))
    request = engine.requests[1]
    engine.step({1: 5})
    seen = []
    for _ in range(12):
        proposal = engine.step({1: 2})[0].tolist()
        seen.append((request.computed, sum(draft >= 0 for draft in proposal)))
    assert all(num == min(K, max(0, 10 - (computed - 1))) for computed, num in seen), seen
    assert seen[-1][1] == 0
    assert request.tokens == engine.plain(request, len(request.tokens) - request.prompt_len)


class Spy(PagedAttentionBuilder):
    """Views, and a note of what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[BuildPhase, CommonAttentionMetadata, int]] = []

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> PagedAttentionMetadata:
        longest = int(common.seq_lens.max()) if phase is BuildPhase.RUN else 0
        self.seen.append((phase, common, longest))
        return super().build(common, group, phase)


class With:
    """The torch backend with another builder."""

    tolerates_loose_bounds = False

    def __init__(self, builder: Any) -> None:
        self._builder, self._inner = builder, backend_named("torch")
        self.name, self.fuses_rotary, self.needs_finite_cache = "with", False, False

    def builder(self) -> Any:
        return self._builder

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: Any, meta: Any, *rest: Any, **more: Any) -> Tensor:
        out: Tensor = self._inner.attend(q, k, v, kv, meta, *rest, **more)
        return out


class PerPass(Spy):
    """Reads lengths on the host, as a builder that plans there: each pass needs a build."""

    reads = PagedAttentionBuilder.reads | {"seq_lens_cpu_upper_bound"}


@pytest.mark.parametrize("builder", [Spy, PerPass])
def test_c5_the_drafts_bound_is_the_batchs_and_not_the_models(builder: type[Spy]) -> None:
    spy = builder()
    engine = make(attention=With(spy), limits=BatchLimits(4, 32, 18))
    assert engine.drafter is not None
    assert engine.drafter.draft_max_seq_len == 18
    engine.step({1: 5})
    assert engine.drafter.draft_max_seq_len == 5 + K
    for _ in range(4):
        engine.step({1: min(1 + K, 18 - engine.requests[1].computed)})
        assert engine.context is not None
        upper = int(engine.context.batch.seq_len_bound.upper.max())
        assert engine.drafter.draft_max_seq_len == min(upper + K, 18)
        _, common, longest = spy.seen[-1]
        assert common.max_seq_len == engine.drafter.draft_max_seq_len
        assert longest <= common.max_seq_len <= 18
        assert longest <= common.seq_len_bound.max() <= common.max_seq_len
    assert engine.drafter.draft_max_seq_len == 18


def test_c5_under_capture_the_bound_is_the_models() -> None:
    spy = Spy()
    make(attention=With(spy), graphs=recorded(), mode="FULL_DECODE_ONLY")
    for phase in (BuildPhase.WARMUP, BuildPhase.CAPTURE):
        assert [common.max_seq_len for was, common, _ in spy.seen if was is phase] == [40] * 3


def test_c9_only_rows_without_drafts_have_exact_lengths() -> None:
    spy = PerPass()
    engine = make(attention=With(spy))
    engine.step({0: 5})
    engine.step({1: 5})
    engine.step({0: 1, 1: 3, 2: 2})
    _, common, _ = spy.seen[-1]
    assert common.seq_len_bound.exact.tolist() == [True, False, True]
    assert common.query_start_loc_cpu.tolist() == common.query_start_loc.tolist() == [0, 1, 2, 3]
    lengths = common.seq_lens - 1  # by now the buffers hold the pass that would come next
    assert [common.seq_len_bound.upper[row] for row in (0, 2)] == [lengths[0], lengths[2]]


# --- E: metadata of the chain -------------------------------------------------------------------------------


class Planned(PagedAttentionBuilder):
    """Keeps what kernels read in buffers of its own, as a builder with a schedule does."""

    def __init__(self) -> None:
        super().__init__()
        self.lens = torch.zeros(8, dtype=torch.int32)
        self.slots = torch.full((8,), -1)
        self.common: CommonAttentionMetadata | None = None
        self.frozen = False

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> PagedAttentionMetadata:
        views = super().build(common, group, phase)
        rows = common.num_reqs
        if not self.frozen:
            self._plan(views)
        self.views = views
        return replace(views, seq_lens=self.lens[:rows], slot_mapping=self.slots[:rows])

    def _plan(self, views: PagedAttentionMetadata) -> None:
        self.lens[: len(views.seq_lens)] = views.seq_lens
        self.slots[: len(views.slot_mapping)] = views.slot_mapping

    def addresses(self) -> Mapping[str, int]:
        return {"lens": self.lens.data_ptr(), "slots": self.slots.data_ptr()}


class Refreshed(Planned):
    """Can follow the batch on the device."""

    off = False

    def refresh(self, metadata: PagedAttentionMetadata) -> None:
        if not self.off:
            self._plan(self.views)


class Switched(Refreshed):
    """With its refresh switched off: built once for the whole chain."""

    off = True


def steady(engine: GraphEngine) -> Tensor:
    for row, request in engine.requests.items():
        engine.step({row: request.prompt_len})
    return torch.cat([engine.step(dict.fromkeys(range(3), 1 + K)) for _ in range(4)])


@pytest.mark.parametrize("builder", [PagedAttentionBuilder, Planned, Refreshed])
@pytest.mark.parametrize("graphs", [None, "step", "fused"])
def test_e1_every_kind_of_builder_gives_the_same_drafts(builder: Callable[[], Any], graphs: str | None) -> None:
    options = None if graphs is None else recorded(graphs == "fused")
    engine = make(attention=With(builder()), graphs=options, mode=options and "FULL_DECODE_ONLY")
    assert engine.drafter is not None
    run(engine, SCHEDULE[:4])
    if options is not None:
        assert engine.drafter.decisions.by_reason == {DispatchReason.DECODE: 4}


def test_e1_stale_metadata_spoils_the_drafts_behind_the_first() -> None:
    """Nobody but acceptance notices (#38311): position 0 has the target's metadata and stays right."""
    right = steady(make())
    switched = steady(make(attention=With(Switched())))
    assert torch.equal(right[:, :2], switched[:, :2])
    assert not torch.equal(right[:, 2], switched[:, 2])
    frozen = Planned()
    frozen.frozen = True
    stale = steady(make(attention=With(frozen)))
    assert torch.equal(right[:, 0], stale[:, 0])
    assert not torch.equal(right[:, 1:], stale[:, 1:])


def test_e1_a_graph_without_the_refresh_is_as_wrong() -> None:
    engine = make(attention=With(Switched()), graphs=recorded(), mode="FULL_DECODE_ONLY")
    right, stale = steady(make()), steady(engine)
    assert torch.equal(right[:, 0], stale[:, 0])
    assert not torch.equal(right[:, 1:], stale[:, 1:])


@pytest.mark.parametrize(
    ("builder", "graphs", "builds"),
    [
        (PagedAttentionBuilder, None, 1),
        (PagedAttentionBuilder, "fused", 1),
        (Refreshed, "fused", 1),
        (Planned, None, K - 1),
        (Planned, "step", K - 1),
        (PerPass, None, K - 1),
    ],
)
def test_builds_per_step_and_none_of_them_for_the_first_pass(
    builder: Callable[[], Any], graphs: str | None, builds: int
) -> None:
    options = None if graphs is None else recorded(graphs == "fused")
    engine = make(attention=With(builder()), graphs=options, mode=options and "FULL_DECODE_ONLY")
    assert engine.drafter is not None
    steady(engine)
    before = num_builds(engine)
    engine.step(dict.fromkeys(range(3), 1 + K))
    assert num_builds(engine) - before == builds
    assert engine.drafter.draft_prefill_builds == 0


def test_a_target_without_attention_costs_one_build_more_and_drafts_the_same() -> None:
    engine, lender = make(), make()
    assert engine.drafter is not None
    propose = engine.drafter.propose
    engine.drafter.propose = lambda context, **rest: propose(replace(context, attention=None), **rest)  # type: ignore
    for work, asked in SCHEDULE[:4]:
        assert torch.equal(engine.step(work, asked), lender.step(work, asked))
    assert num_builds(engine) - num_builds(lender) == engine.drafter.draft_prefill_builds == 4


# --- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "per-pass"])
def test_graphs_propose_what_eager_passes_do(mode: str, fuse: bool) -> None:
    eager, engine = make(), make(graphs=recorded(fuse), mode=mode)
    for ours, theirs in zip(run(engine, check=False), run(eager, check=False), strict=True):
        assert torch.equal(ours, theirs)
    for request in engine.requests.values():
        assert_caches_are_exact(engine, request)
    assert engine.num_graph_steps >= (2 if mode == "FULL_DECODE_ONLY" else len(SCHEDULE) - 1)
    assert engine.drafter is not None
    assert engine.drafter.decisions.by_reason == {DispatchReason.DECODE: 8}
    assert eager.drafter is not None
    assert eager.drafter.decisions.total == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("mode", [None, "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
def test_a_gpu_proposes_what_the_cpu_does(mode: str | None) -> None:
    options = None
    if mode is not None:
        options = DraftGraphs(get_graph_backend("cuda", "cuda"), (1, 2, 4), checks=ReplayChecks.PARANOID)
    engine = make(
        lambda target: ToyHead(target, device="cuda"),
        target=ToyTarget(device="cuda"),
        device="cuda",
        graphs=options,
        mode=mode,
    )
    for ours, theirs in zip(run(engine, check=False), run(make(), check=False), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_fewer_drafts_than_a_graphs_chain_use_it_and_are_cut() -> None:
    engine = make(graphs=recorded(), mode="FULL_DECODE_ONLY")
    assert engine.drafter is not None
    assert engine.drafter.decode is not None
    assert {key.variant for key in engine.drafter.decode.ready} == {(K,)}
    run(engine, (({0: 5}, 2), ({1: 5}, 1), ({0: 3, 1: 2}, 2), ({0: 3, 1: 3}, None)))
    assert engine.drafter.decisions.by_reason == {DispatchReason.DECODE: 3}


def test_one_draft_needs_no_chain() -> None:
    engine = make(k=1, graphs=recorded(), mode="FULL_DECODE_ONLY")
    assert engine.drafter is not None
    assert engine.drafter.decode is not None
    assert not engine.drafter.decode.dispatcher.keys
    run(engine, (({0: 5}, None), ({0: 2, 1: 5}, None), ({0: 2, 1: 2}, None)))
    assert num_builds(engine) == 0


class Operators(TorchDispatchMode):
    """Keeps the names of all operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class NoSync(TorchDispatchMode):
    """Refuses what reads a device value on the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [None, "FULL"])
def test_a_proposal_never_waits_for_the_device(mode: str | None) -> None:
    engine = make(graphs=mode and recorded(), mode=mode)  # type: ignore[arg-type]
    assert engine.drafter is not None
    propose = engine.drafter.propose

    def watched(*args: Any, **rest: Any) -> Tensor:
        with NoSync():
            return propose(*args, **rest)

    engine.drafter.propose = watched  # type: ignore[method-assign]
    run(engine, SCHEDULE[:6], check=False)


@pytest.mark.parametrize(("other", "reason"), [(3, DispatchReason.DECODE), (9, DispatchReason.NUM_REQS)])
def test_ranks_agree_on_the_chains_graph(other: int, reason: DispatchReason) -> None:
    """A rank with one row pads to the graph of the rank with three, or runs eagerly as the rank with nine does."""

    class TwoRanks:
        def __init__(self, plan: CudagraphDispatcher) -> None:
            self.plan = plan

        def coordinate(self, mine: RankStep) -> Any:
            assert mine.batch is not None
            theirs = replace(mine.batch, num_reqs=other, num_tokens=other)
            return dispatch_jointly((mine, RankStep(theirs, mine.ready)), self.plan)

    alone, graphs = make(), replace(recorded(), coordinator=TwoRanks)
    engine = make(graphs=graphs, mode="FULL_DECODE_ONLY")
    for work in ({1: 5}, {1: 1 + K}):
        assert torch.equal(alone.step(work), engine.step(work))
    assert engine.drafter is not None
    decisions = engine.drafter.decisions
    assert decisions.by_reason == {reason: 2}
    graph = (8, 6) if reason is DispatchReason.DECODE else (0, 0)
    assert (decisions.num_graph_tokens, decisions.num_pad_tokens) == graph


# --- wiring -------------------------------------------------------------------------------------------------


def wired(**changes: Any) -> EagleSpeculator:
    target = ToyTarget()
    arguments: dict[str, Any] = {
        "head": ToyHead(target),
        "backend": backend_named("torch"),
        "limits": BatchLimits(4, 32, 40),
        "num_speculative_tokens": K,
    }
    caches: dict[str, Any] = {
        "kv": paged_caches(1, 9, 4),
        "groups": (KVCacheGroup(4, 10, lookahead_tokens=K),),
        "group": 0,
    }
    arguments |= {name: value for name, value in changes.items() if name not in caches}
    caches |= {name: value for name, value in changes.items() if name in caches}
    return EagleSpeculator(cache=DraftCache(**caches), **arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group": 1}, "group is 1; there are 1 KV groups"),
        ({"groups": (KVCacheGroup(4, 10, has_slots=False, lookahead_tokens=K),)}, "stores no tokens"),
        ({"groups": (KVCacheGroup(4, 9, lookahead_tokens=K),)}, "fewer than max_model_len 40"),
        ({"groups": (KVCacheGroup(4, 10, lookahead_tokens=K - 2),)}, "lookahead_tokens is 1; 3 drafts"),
        ({"kv": paged_caches(2, 9, 4)}, "kv has 2 layers; the head has 1"),
        ({"kv": paged_caches(1, 9, 8)}, "blocks of 8 tokens; the group has 4"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ],
)
def test_c8_what_does_not_fit_together_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wired(**changes)


def test_a_builder_that_wants_keys_in_padded_rows_is_refused() -> None:
    builder = PagedAttentionBuilder()
    builder.seq_len_fill = 1
    with pytest.raises(ValueError, match="seq_len_fill 1"):
        wired(backend=With(builder))


def test_a_context_that_does_not_fit_is_refused() -> None:
    engine = make()
    engine.step({0: 5})
    context, drafter = engine.context, engine.drafter
    assert context is not None
    assert drafter is not None
    for changes, text in (
        ({"features": context.features[:1]}, "features has 1 tensors; the head needs 3"),
        ({"features": tuple(f[:2] for f in context.features)}, r"features\[0\] has 2 tokens; the step has 5"),
        ({"num_drafts": K + 1}, r"num_drafts is 4; it must be in \[0, 3\]"),
        ({"num_drafts": -1}, "num_drafts is -1"),
    ):
        with pytest.raises(ValueError, match=text):
            drafter.propose(replace(context, **changes))  # type: ignore[arg-type]


def test_needs_are_the_heads() -> None:
    assert wired().needs == TargetNeeds(taps=(1, 2), hidden=True)
    wired().admit(0, [1, 2])


# --- what the host knows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "FULL"])
def test_greedy_rows_draft_without_noise(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise changes no draft; graphs, which serve any rows, do not look at it."""
    clean, engine = make(), make(graphs=mode and recorded(), mode=mode)  # type: ignore[arg-type]
    assert engine.drafter is not None
    propose = engine.drafter.propose
    for each in (clean, engine):
        for request in each.requests.values():
            request.temperature = 0.0

    def promised(context: DraftContext) -> Tensor:
        return propose(replace(context, greedy=True))

    engine.drafter.propose = promised  # type: ignore[method-assign]
    expected = [clean.step(*step) for step in SCHEDULE]
    if mode is None:
        monkeypatch.setattr("bateleur.eagle.passes.draw_draft", None)
    for want, step in zip(expected, SCHEDULE, strict=True):
        assert torch.equal(engine.step(*step), want)
    if mode is not None:
        for each in (clean, engine):
            each.requests[0].temperature = 2.0
        engine.drafter.propose = propose  # type: ignore[method-assign]
        for _ in range(3):
            work = dict.fromkeys(range(3), 1)
            assert torch.equal(engine.step(work), clean.step(work))


def test_a_loan_is_checked_in_every_step() -> None:
    engine = make()
    assert engine.drafter is not None
    for work in ({0: 5}, {1: 5}, {0: 1, 1: 1}):
        engine.step(work)
    context = engine.context
    assert context is not None
    assert context.attention is not None
    meta = context.attention
    for changes in (
        {"max_seq_len": meta.max_seq_len + 1},
        {"max_query_len": meta.max_query_len + 1},
        *({name: getattr(meta, name).clone()} for name in ("query_start_loc", "seq_lens", "slot_mapping")),
        {"block_table": meta.block_table.clone()},
    ):
        with pytest.raises(BorrowError, match=next(iter(changes))):
            engine.drafter.propose(replace(context, attention=replace(meta, **changes)))


def test_drafts_do_not_depend_on_what_a_block_held_before() -> None:
    engine, clean = make(), make()
    for drafter in (engine.drafter, clean.drafter):
        assert drafter is not None
        for cache in (each for pair in drafter.kv for each in pair):
            cache[1:] = torch.nan if drafter is engine.drafter else 0
    for step in SCHEDULE:
        assert torch.equal(engine.step(*step), clean.step(*step))
