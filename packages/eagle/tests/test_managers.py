"""The drafter's graphs: what they borrow, what they own, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphMode,
    NotCaptured,
    Phase,
    RecordedBackend,
    ReplayChecks,
    StagedBatch,
    StaleState,
)
from bateleur.eagle.borrow import BorrowError
from bateleur.eagle.buffers import DraftCache
from bateleur.eagle.conformance.toy_engine import DTYPE, HEAD_DIM, ToyTarget, paged_caches
from bateleur.eagle.managers import DecodeEagleCudaGraphManager, DraftGraphs, PrefillEagleCudaGraphManager
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.metadata import BatchLimits, GraphSupport, get_backend
from eagle_doubles.engine import GraphEngine
from eagle_doubles.heads import ToyHead

K = 3
ROWS = (1, 2, 4, 8)
UNIFORM = [BatchExecutionDescriptor(CudaGraphMode.FULL, (1 + K) * n, n, 1 + K, 1 + K) for n in ROWS]


def make(
    graphs: bool, *, capture: bool = True, checks: ReplayChecks = ReplayChecks.PARANOID
) -> tuple[GraphEngine, Any]:
    """An engine with a drafter, and the states that its target captured."""
    target = ToyTarget()
    backend = get_backend("torch", device="cpu", dtype=DTYPE, head_dim=HEAD_DIM)
    limits = BatchLimits(8, 32, 40)
    engine = GraphEngine(target, backend, limits, lookahead=K)
    options = DraftGraphs(RecordedBackend(), ROWS, checks=checks) if graphs else None
    engine.drafter = EagleSpeculator(
        ToyHead(target),
        DraftCache(paged_caches(1, engine.num_blocks, engine.block_size), engine.groups),
        backend,
        limits,
        K,
        graphs=options,
    )
    for row in range(8):
        engine.add(row, [(3 * row + i) % 19 for i in range(3 + row % 3)], seed=row, temperature=row % 3 / 2)
    states = None
    if graphs:
        sizes = [(1 + K) * n for n in ROWS]
        plan = CudagraphDispatcher.make(
            CudaGraphMode.FULL_DECODE_ONLY, sizes, max_num_reqs=8, max_num_tokens=32, query_lens=(1 + K,)
        )
        states = engine.capture(plan, RecordedBackend(), checks)
        if capture:
            engine.drafter.capture(states)
    return engine, states


def prompts(engine: GraphEngine) -> None:
    for row, request in engine.requests.items():
        engine.step({row: request.prompt_len})


# --- wiring -------------------------------------------------------------------------------------------------


def test_a_key_that_the_target_never_captured_is_refused_when_wired_with_the_nearest() -> None:
    _, states = make(True, capture=False)
    missing = BatchExecutionDescriptor(CudaGraphMode.FULL, 12, 3, 4, 4)
    with pytest.raises(KeyError, match=r"12 tokens.*nearest: FULL 8 tokens.*FULL 16 tokens") as caught:
        PrefillEagleCudaGraphManager(states, RecordedBackend(), keys=[UNIFORM[0], missing])
    assert isinstance(caught.value, NotCaptured)


def test_a_speculator_refuses_it_too_and_captures_nothing() -> None:
    engine, states = make(True, capture=False)
    assert engine.drafter is not None
    missing = BatchExecutionDescriptor(CudaGraphMode.FULL, 12, 3, 4, 4)
    with pytest.raises(NotCaptured):
        engine.drafter.capture(states, keys=[*UNIFORM, missing])
    assert engine.drafter.decode is not None
    assert not engine.drafter.decode.ready


def test_nothing_captured_is_nothing_to_borrow() -> None:
    _, states = make(True, capture=False)
    with pytest.raises(ValueError, match="must have at least one captured key"):
        PrefillEagleCudaGraphManager(states, RecordedBackend(), keys=[])


def test_a_subset_is_captured_and_the_rest_runs_eagerly_with_the_same_drafts() -> None:
    (plain, _), (engine, states) = make(False), make(True, capture=False)
    assert engine.drafter is not None
    engine.drafter.capture(states, keys=UNIFORM[:2])
    manager = engine.drafter.prefill
    assert manager is not None
    assert list(manager.ready) == [UNIFORM[1], UNIFORM[0]]
    for each in (plain, engine):
        prompts(each)
    work = dict.fromkeys(range(4), 1 + K)
    assert torch.equal(plain.step(work), engine.step(work))
    assert engine.context is not None
    with pytest.raises(NotCaptured, match="it is not in the dispatcher"):
        manager.replay(UNIFORM[2], StagedBatch(UNIFORM[2], engine.context, 1))  # type: ignore[arg-type]


def test_a_speculator_without_graphs_has_nothing_to_capture_with() -> None:
    engine, _ = make(False)
    assert engine.drafter is not None
    with pytest.raises(ValueError, match="graphs is None"):
        engine.drafter.capture(None)  # type: ignore[arg-type]


def test_first_passes_are_captured_largest_first() -> None:
    _, states = make(True, capture=False)
    manager = PrefillEagleCudaGraphManager(states, RecordedBackend(), keys=UNIFORM)
    assert manager.dispatcher.keys == tuple(reversed(UNIFORM))


def test_e5_metadata_that_no_graph_may_hold_leaves_the_chain_eager() -> None:
    never = DecodeEagleCudaGraphManager.plan_for(ROWS, 8, None, GraphSupport.NEVER)
    assert never.keys == ()
    assert never.dispatch(DecodeEagleCudaGraphManager.ask(3, None)).descriptor is None


def test_c7_sizes_are_rows_of_one_token_cut_at_the_limit() -> None:
    plan = DecodeEagleCudaGraphManager.plan_for((1, 3, 64), 6, 4, GraphSupport.ALWAYS)
    assert sorted({(key.num_reqs, key.num_tokens, key.max_query_len) for key in plan.keys}) == [
        (1, 1, 1),
        (3, 3, 1),
        (6, 6, 1),
    ]
    assert {key.variant for key in plan.keys} == {(4,)}
    assert all(key.mode is CudaGraphMode.FULL for key in plan.keys)


# --- contents on loan ---------------------------------------------------------------------------------------


def test_e2_every_size_drafts_from_its_own_contents() -> None:
    """Captured 32, 16, 8, 4 tokens through one set of buffers, which then hold the smallest (vLLM #47561)."""
    (plain, _), (engine, states) = make(False), make(True)
    for each in (plain, engine):
        prompts(each)
    with pytest.raises(StaleState):
        states[UNIFORM[-1]].current_state()
    before = engine.num_graph_steps
    for rows in (8, 4, 2, 1, 8, 1, 4):
        work = dict.fromkeys(range(rows), 1 + K)
        assert torch.equal(plain.step(work), engine.step(work)), rows
    assert engine.num_graph_steps - before == 7
    assert engine.drafter is not None
    assert engine.drafter.draft_prefill_builds == 0


def test_e2_what_the_buffers_held_last_would_draft_something_else() -> None:
    """The negative control: a first pass replayed after another step was staged drafts otherwise, and is refused."""
    engine, _ = make(True, checks=ReplayChecks.CHEAP)
    prompts(engine)
    right = engine.step(dict.fromkeys(range(4), 1 + K))
    context = engine.context
    assert context is not None
    assert engine.drafter is not None
    assert torch.equal(engine.drafter.propose(context), right)
    engine.step({5: 1 + K})
    with pytest.raises(BorrowError, match="staged at generation"):
        engine.drafter.propose(context)
    lie = replace(context, batch=replace(context.batch, generation=engine.generation))
    assert not torch.equal(engine.drafter.propose(lie), right)


def test_a_loan_of_another_groups_metadata_is_refused() -> None:
    engine, _ = make(False)
    prompts(engine)
    assert engine.context is not None
    assert engine.context.attention is not None
    assert engine.drafter is not None
    batch = engine.context.batch
    other = replace(engine.builder.build(batch, 0), block_table=batch.block_tables[0].clone())
    changed = replace(engine.context, attention=other)
    with pytest.raises(BorrowError, match="block_table is not"):
        engine.drafter.propose(changed)


@pytest.mark.parametrize("manager", ["prefill", "decode"])
def test_replays_equal_eager_runs_on_random_contents(manager: str) -> None:
    engine, _ = make(True)
    assert engine.drafter is not None
    also = {"tokens": engine.drafter.inputs.tokens, "hidden": engine.drafter.inputs.hidden}
    also |= {f"kv{i}": cache for i, cache in enumerate(engine.drafter.kv[0])}
    graphs = getattr(engine.drafter, manager)
    assert len(graphs.ready) == 4
    report = graphs.verify(fuzz=2, extra_tensors=also)
    assert report.ok, report.table()


# --- capture ------------------------------------------------------------------------------------------------


def test_c2_stale_counters_are_reset_before_the_capture() -> None:
    """Row indices of a step of 32 tokens index out of a graph of 4 (#39773)."""
    (plain, _), (engine, states) = make(False), make(True, capture=False, checks=ReplayChecks.CHEAP)
    assert engine.drafter is not None
    for tensor in engine.drafter.inputs.tensors().values():
        tensor.fill_(2**30)
    engine.drafter.capture(states)
    for each in (plain, engine):
        prompts(each)
    assert torch.equal(plain.step({0: 1 + K}), engine.step({0: 1 + K}))


@pytest.mark.parametrize("manager", ["prefill", "decode"])
def test_c2_staging_a_capture_defines_all_that_a_pass_reads(manager: str) -> None:
    engine, _ = make(True)
    assert engine.drafter is not None
    graphs, x = getattr(engine.drafter, manager), engine.drafter.inputs
    key = max(graphs.ready)
    x.poison()
    graphs.producer.stage(key, Phase.WARMUP)
    assert x.hidden[: key.num_tokens].isfinite().all()
    assert (x.positions < engine.limits.max_model_len).all()
    assert (x.input_ids < 19).all()
    assert (x.last_index < key.num_tokens).all()
    assert (x.slot_mapping == -1).all()
    assert (x.seq_lens <= engine.limits.max_model_len).all()
    for name in ("block_table", "seeds", "temperature"):
        assert not getattr(x, name).any(), name


def test_a_capture_stores_no_key_and_no_value() -> None:
    engine, _ = make(True)
    assert engine.drafter is not None
    for cache in engine.drafter.kv[0]:
        assert cache[1:].isnan().all()
        assert not cache[0].any()


def test_e4_the_targets_outputs_outlive_the_draft() -> None:
    engine, _ = make(True)
    prompts(engine)
    assert engine.drafter is not None
    propose, seen = engine.drafter.propose, []

    def spy(context: Any, **rest: Any) -> torch.Tensor:
        before = [feature.clone() for feature in context.features]
        proposal = propose(context, **rest)
        seen.append(all(map(torch.equal, before, context.features)))
        return proposal

    engine.drafter.propose = spy  # type: ignore[method-assign]
    engine.step(dict.fromkeys(range(8), 1 + K))
    assert seen == [True]


def count_replays(manager: Any, replays: list[BatchExecutionDescriptor]) -> None:
    replay = manager.replay

    def counted(key: BatchExecutionDescriptor, staged: Any) -> Any:
        replays.append(key)
        return replay(key, staged)

    manager.replay = counted


def test_a_fused_chain_is_one_replay_and_single_passes_are_one_each() -> None:
    counts = []
    for fuse in (True, False):
        engine, states = make(True, capture=False)
        assert engine.drafter is not None
        options = DraftGraphs(RecordedBackend(), ROWS, fuse=fuse)
        engine.drafter = EagleSpeculator(
            engine.drafter.head,
            DraftCache(engine.drafter.kv, engine.groups),
            engine.backend,
            engine.limits,
            K,
            graphs=options,
        )
        engine.drafter.capture(states)
        prompts(engine)
        replays: list[BatchExecutionDescriptor] = []
        for manager in (engine.drafter.prefill, engine.drafter.decode):
            count_replays(manager, replays)
        engine.step(dict.fromkeys(range(3), 1 + K))
        counts.append([(key.num_tokens, key.variant) for key in replays])
    assert counts == [[(16, ()), (4, (K,))], [(16, ()), (4, ()), (4, ())]]
