"""Bug catalogue tests that fit no other file, and a check that each of M01 to M38 has a test."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_operators as reference
from bateleur.mamba import (
    CacheLayout,
    FoldCache,
    Mamba2,
    MambaCacheMode,
    MambaMetadata,
    MambaMetadataBuilder,
    Mixer,
    MixerBatch,
    PrefixRetention,
    RequestStates,
    SlotPlan,
    StatePolicy,
    copy_states,
    plan_copy,
    plan_fold,
    plan_replay,
)
from bateleur.metadata import (
    BatchLimits,
    BatchShape,
    BuildPhase,
    CommonAttentionMetadata,
    InputBuffers,
    KVCacheGroup,
    StepRows,
)

NONE, ALIGN, ALL = MambaCacheMode
FOLD = StatePolicy.FOLD
MAX_LEN = 64


def test_every_id_has_a_test():
    names = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    parts = {part for name in names if name.startswith("test_m") for part in name.split("_")}
    assert [i for i in range(1, 39) if f"m{i:02}" not in parts] == []


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Groups:
    """Staged batches of two Mamba groups with 2 drafts: blocks of 4 and of 16 tokens. A table of request rows follows
    the table of each group.
    """

    def __init__(self) -> None:
        self.layouts = [CacheLayout(ALL, size, 2, MAX_LEN) for size in (4, 16)]
        widths = [(kind.block_size, width) for kind in self.layouts for width in (kind.columns(), 1)]
        kinds = [KVCacheGroup(size, width, has_slots=False) for size, width in widths]
        self.buffers = InputBuffers(BatchLimits(8, 128, MAX_LEN), kinds, "cpu")
        self.buffers.poison()
        self.builders = [MambaMetadataBuilder(kind, 4, 8, "cpu", RequestStates(9, "cpu")) for kind in self.layouts]

    def stage(self, rows: list[tuple[int, int, bool]], first: int = 100) -> CommonAttentionMetadata:
        """rows: (query_len, computed, is_prefilling); row r of group g owns slots from first * (1 + g) * (1 + r) on."""
        lens, computed, prompt = (np.array(column) for column in zip(*rows, strict=True))
        row = 1 + np.arange(len(rows), dtype=np.int32)[:, None]
        tables = tuple(
            table
            for g, kind in enumerate(self.layouts)
            for table in (first * (1 + g) * row + np.arange(kind.columns(), dtype=np.int32), row)
        )
        ids = np.zeros(int(lens.sum()), np.int32)
        step = StepRows(lens.astype(np.int32), computed.astype(np.int32), prompt.astype(bool), ids, tables)
        return self.buffers.stage(step, BatchShape.of(len(rows), len(ids), int(lens.max())))

    def build(self, batch: CommonAttentionMetadata, group: int) -> MambaMetadata:
        return self.builders[group].build(batch, 2 * group)


def as_lists(meta: MambaMetadata) -> dict[str, object]:
    """Return copies of all arguments of the operators."""
    plan = {field.name: getattr(meta.plan, field.name).tolist() for field in fields(SlotPlan)}
    cut = {f"p_{field.name}": getattr(meta.prefill_chunks, field.name) for field in fields(meta.prefill_chunks)}
    names = [field.name for field in fields(meta) if field.name not in ("plan", "prefill_chunks")]
    others = cut | {name: getattr(meta, name) for name in names}
    return plan | {name: v.tolist() if isinstance(v, Tensor) else v for name, v in others.items()}


MIXED = [(3, 21, False), (1, 16, False), (9, 14, True), (5, 0, True)]


def test_m06_builds_of_two_groups_interleave():
    # vllm #34865, #34874: a shared buffer of block indices held the other group's.
    groups = Groups()
    batch = groups.stage(MIXED)
    metas = [groups.build(batch, 0), groups.build(batch, 1)]
    seen = [as_lists(meta) for meta in metas]
    assert as_lists(metas[0]) == seen[0]  # the second build left the first one's alone
    assert as_lists(groups.build(batch, 0)) == seen[0]
    assert as_lists(groups.build(batch, 1)) == seen[1]
    # Row 0 ends in column 23 // size, row 1 in column 16 // size; each group has its own slots there.
    assert seen[0]["run_col"][:2] == [5, 4]
    assert seen[1]["run_col"][:2] == [1, 1]
    assert seen[0]["conv_write"][:2] == [105, 204]
    assert seen[1]["conv_write"][:2] == [201, 401]
    # Of 14 tokens and 9: chunks end at 16, 20 and 23, all of them kept in blocks of 4, and one boundary in those of 16.
    assert seen[0]["p_chunk_write"][:3] == [303, 304, 305]
    assert seen[1]["p_chunk_write"][:3] == [600, 0, 601]


@pytest.mark.parametrize("phase", list(BuildPhase))
def test_m08_m25_a_dummy_step_leaves_every_state(phase):
    # vllm #37728, #49757: rows of an idle rank wrote through stale table rows. M25 (#55774): a step that a capture ran
    # was committed. Prompts and decodes of a large batch go before.
    groups = Groups()
    groups.build(groups.stage(MIXED), 0)
    spec = Mamba2(2, 3, 4, 1, num_speculative_tokens=2, conv_dtype=torch.float32)
    conv, ssm = torch.randn(500, *spec.conv_shape), torch.randn(500, *spec.state_shape)
    before = conv.clone(), ssm.clone()
    states = RequestStates(5, "cpu")
    rows = torch.arange(1, 5)
    states.scatter(rows, rows % 3 + 1, prev_col=rows, base=rows)
    kept = [t.clone() for t in (states.gather(rows).accepted, states.gather(rows).prev_col)]
    for shape in (BatchShape(3, 9, 4, 12, 3), BatchShape(2, 30, 4, 32, 30)):
        batch = groups.buffers.dummy(shape)
        meta = groups.builders[0].build(batch, 0, phase)
        run_layer(spec, meta, batch.num_tokens, conv, ssm)
        lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        table, null = batch.block_tables[0], torch.zeros(4, dtype=torch.int64)
        n = batch.num_computed_tokens
        done = plan_copy(groups.layouts[0], table, n, lens, lens - 1, null + 3, meta.plan)
        assert not done.dst.any()
        copy_states(conv[None], ssm[None], done.conv_src, done.conv_bias, done.ssm_src, done.dst)
        states.scatter(null, done.accepted, prev_col=done.prev_col)
    assert torch.equal(conv[1:], before[0][1:])
    assert torch.equal(ssm[1:], before[1][1:])
    assert torch.equal(states.gather(rows).accepted, kept[0])
    assert torch.equal(states.gather(rows).prev_col, kept[1])


def run_layer(spec: Mamba2, meta: MambaMetadata, tokens: int, conv: Tensor, ssm: Tensor) -> None:
    """Run all operators of a step that write states."""
    heads = spec.num_heads
    u, dt, weight = (torch.randn(tokens, spec.conv_dim), torch.randn(tokens, heads), torch.randn(spec.conv_dim, 4))
    mixer = Mixer(spec, weight, None, (-torch.rand(heads), torch.rand(heads), torch.rand(heads)))
    mixer.mix(u, (dt,), MixerBatch.of(meta), (conv, ssm), None)


def test_m08_m25_a_dummy_step_under_fold_leaves_pages_rings_and_requests():
    layout = CacheLayout(ALL, 4, 2, MAX_LEN, FOLD)
    cache, table = fold_cache(layout)
    step = cache.step(table[:2], [1, 2], torch.zeros(2, dtype=torch.int64), [6, 3])
    step.mix(0, *tokens_of(cache, 9))
    step.commit([1, 1])
    rings, pages = cache.pages.rings(0).tensors(), cache.pages.layer(0)
    before = [t.clone() for t in (*rings, *pages)]
    rows = torch.tensor([1, 2])
    kept = cache.states.gather(rows)
    # Padded rows: stale table rows and counts, no tokens, request row 0.
    null, stale = torch.zeros(3, dtype=torch.int64), torch.tensor([9, 63, 4])
    plan = plan_replay(layout, table, stale, null, stale, stale)
    done = plan_fold(layout, plan, stale, null, stale)
    assert not any(getattr(done, field.name).any() for field in fields(done))
    args = (null, plan.ring_start, done.count, plan.slot, done.dst, done.page_offset)
    reference.fold_ring(*(tensor[None] for tensor in (*pages[::-1], *rings, cache.mixers[0].params[0])), *args)
    cache.states.scatter(null, done.accepted, base=done.base)
    assert all(torch.equal(a, b) for a, b in zip((*rings, *pages), before, strict=True))
    assert torch.equal(cache.states.gather(rows).base, kept.base)


def fold_cache(layout: CacheLayout, rows: int = 3) -> tuple[FoldCache, Tensor]:
    """One layer, with a slot for every column of every row except row 0."""
    torch.manual_seed(0)
    f64, heads = torch.float64, 2
    drafts = layout.num_speculative_tokens
    spec = Mamba2(heads, 3, 4, 1, num_speculative_tokens=drafts, conv_dtype=f64, ssm_dtype=f64, policy=FOLD)
    A, D, dt_bias = -torch.rand(heads, dtype=f64), *torch.rand(2, heads, dtype=f64)
    mixer = Mixer(spec, torch.randn(spec.conv_dim, 4, dtype=f64), None, (A, D, dt_bias))
    slots = rows * layout.columns()
    cache = FoldCache(layout, [mixer], num_slots=1 + slots, num_rows=1 + rows, chunk_size=layout.block_size)
    return cache, torch.arange(1, 1 + slots, dtype=torch.int32).view(rows, -1)


def tokens_of(cache: FoldCache, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    spec = cache.mixers[0].spec
    shapes = (count, spec.conv_dim), (count, spec.num_heads)
    xbc, dt = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return xbc, dt


def test_m12_chunks_of_a_part_that_starts_inside_one():
    # vllm #34587, #34798: chunks counted from the part, and not from the request.
    builder = Groups()
    meta = builder.build(builder.stage([(9, 6, True), (4, 8, True), (2, 3, True)]), 0)
    assert meta.prefill_chunks.chunk_start_loc.tolist() == [0, 2, 6, 9, 13, 14, 15]
    assert meta.prefill_chunks.chunk_row.tolist() == [0, 0, 0, 1, 2, 2]
    assert meta.prefill_chunks.row_chunk_loc.tolist() == [0, 3, 4, 6]
    # However a prompt is cut, at multiples of the size or not, it says the same.
    cache, table = fold_cache(CacheLayout(ALL, 4, 2, MAX_LEN, FOLD))
    xbc, dt = tokens_of(cache, 20)
    outputs = []
    for row, parts in enumerate(([20], [4, 12, 4], [6, 3, 11])):
        n, done = torch.zeros(1, dtype=torch.int64), []
        for q in parts:
            step = cache.step(table[row : row + 1], [1 + row], n, [q])
            done.append(step.mix(0, xbc[int(n) : int(n) + q], dt[int(n) : int(n) + q]))
            n = step.commit([1])
        outputs.append(torch.cat(done))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-12, atol=1e-12)


def test_m17_a_step_without_drafts_under_fold():
    # vllm #56531, #39273: what the step before accepted decides where the window begins, drafts or none.
    layout = CacheLayout(ALL, 8, 2, MAX_LEN, FOLD)
    table, n = torch.arange(1, 17, dtype=torch.int32).view(2, 8), i32(13, 13)
    plan = plan_replay(layout, table, n, i32(1, 3), torch.tensor([8, 8]), torch.tensor([3, 3]))
    assert plan.conv_offset.tolist() == [2, 2]
    assert (plan.slot.tolist(), plan.ring_len.tolist()) == ([1, 9], [5, 5])


def test_m24_metadata_survives_a_profiling_run():
    # vllm #54044: what was cached for one batch was given to the next, after a dummy one.
    groups = Groups()
    first = as_lists(groups.build(groups.stage(MIXED), 0))
    for shape in (BatchShape(4, 4, 8, 8, 1), BatchShape(2, 100, 8, 128, 60)):
        groups.builders[0].build(groups.buffers.dummy(shape), 0, BuildPhase.WARMUP)
    assert as_lists(groups.build(groups.stage(MIXED), 0)) == first
    moved = as_lists(groups.build(groups.stage(MIXED, first=110), 0))
    for name, rows in (("conv_write", [0, 1, 2, 3]), ("p_chunk_write", [2, 2, 2, 3, 3])):
        assert moved[name] == [slot + 10 * (1 + r) for r, slot in zip(rows, first[name], strict=True)]


@pytest.mark.parametrize("rule", ["all", "last", "every=8", "prompt_end"])
def test_m36_a_published_page_is_exact_when_it_is_announced_and_for_ever(rule):
    # vllm #53505: others copied pages whose contents were not there yet. `PrefixRetention.columns_to_cache` is the
    # event: after the step's fold was enqueued, it names columns whose pages hold the state and the window, and no step
    # writes them.
    layout, prompt = (CacheLayout(ALL, 4, 2, MAX_LEN, FOLD, 5), 11)  # the shortest ring: folds between boundaries, too
    cache, table = fold_cache(layout, rows=2)
    xbc, dt = tokens_of(cache, 48)
    n, zero = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    retention, announced = PrefixRetention.parse(rule, 4), {}
    rng = np.random.default_rng(0)
    parts = [(7, 0, 7), (4, 0, 4)]
    while int(n) < 40:
        q, decodes, kept = parts.pop(0) if parts else (3, 1, int(rng.integers(1, 4)))
        before = int(n)
        step = cache.step(table[:1], [1], n, [q], decodes)
        step.mix(0, xbc[before : before + q], dt[before : before + q])
        n = step.commit([kept])
        for column in retention.columns_to_cache(before, int(n), prompt):
            announced[column] = [t[table[0, column]].clone() for t in cache.pages.layer(0)]
    assert len(announced) == {"all": 10, "last": 10, "every=8": 5, "prompt_end": 1}[rule]
    for column, seen in announced.items():
        other = cache.step(table[1:], [2], zero, [4 * (column + 1)])
        other.mix(0, xbc[: 4 * (column + 1)], dt[: 4 * (column + 1)])
        for then, pool in zip(seen, cache.pages.layer(0), strict=True):
            assert torch.equal(then, pool[table[0, column]])
            torch.testing.assert_close(then, pool[table[1, column]], rtol=1e-10, atol=1e-10)
