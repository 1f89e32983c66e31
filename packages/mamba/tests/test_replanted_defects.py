"""The five defects of a known design of mode `all`, planted one by one: each makes the tests named here fail.

A: in a step with drafts the conv window is read from the last computed token's block, the state from where the step
before wrote it. B: boundaries crossed by such a step are published as they lie. C: a prompt's end shorter than the
window, after a hit, writes the page that it read. D: a part of up to 8 tokens that crosses a boundary leaves no window
there. E: the window at a boundary among a part's first tokens is taken from the batch before it, which is another
request's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    CopyPlan,
    MambaCacheMode,
    MambaStateManager,
    PrefixRetention,
    SlotPlan,
    StatePolicy,
    mixer,
    ops,
    plan_copy,
    plan_step,
)
from bateleur.mamba.prefill_chunks import PrefillChunker
from oracle import Case, Planner, run, simulate

SHORT = 8
"""Tokens that the design's convolution handles in one program."""
CASES = [(16, 16, 2), (16, 15, 2), (16, 12, 8), (16, 15, 20), (16, 14, 20)]
"""Block size, tokens before the step, tokens of the step: M04."""


def load(name: str) -> ModuleType:
    """The test module of that name, loaded anew, so that what is planted in it stays here."""
    spec = importlib.util.spec_from_file_location(f"planted_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_with_defect_a(layout, table, computed, query_lens, accepted=None, out=None, *, prev_col=None) -> SlotPlan:
    plan = plan_step(layout, table, computed, query_lens, accepted, out, prev_col=prev_col)
    n = computed.long() * (query_lens > 0)
    last_computed = ((n - 1) // layout.block_size).clamp_min(0)
    return replace(plan, conv_read=table.gather(1, last_computed[:, None])[:, 0].long() * (n > 0))


def commit_with_defect_b(layout, table, computed, query_lens, num_drafts, accepted, plan, out=None) -> CopyPlan:
    done = plan_copy(layout, table, computed, query_lens, num_drafts, accepted, plan, out)
    nothing = torch.zeros_like(done.dst)
    return CopyPlan(nothing, nothing, nothing, nothing, torch.minimum(accepted, 1 + num_drafts), done.prev_col)


class DefectA(Planner):
    step = staticmethod(step_with_defect_a)


class DefectB(Planner):
    copy = staticmethod(commit_with_defect_b)


def convolution(defect: str) -> Callable[..., Tensor]:
    """`causal_conv1d_varlen` with defect "C", "D" or "E"; with "", as it is."""

    def planted(
        x, weight, bias, conv_state, request_conv, query_start_loc, read, chunk_start_loc, chunk_row, chunk_write,
        request_conv_write, activation,
    ) -> Tensor:  # fmt: skip
        before, keep = conv_state.clone(), weight.shape[1] - 1
        y = ops.causal_conv1d_varlen(
            x, weight, bias, conv_state, request_conv, query_start_loc, read, chunk_start_loc, chunk_row, chunk_write,
            request_conv_write, activation,
        )  # fmt: skip
        loc = query_start_loc.tolist()
        for row, end, slot in zip(chunk_row.tolist(), chunk_start_loc[1:].tolist(), chunk_write.tolist(), strict=True):
            tokens, done, source = loc[row + 1] - loc[row], end - loc[row], int(read[row])
            if not slot:
                continue
            if defect == "C" and done == tokens < keep and source:
                conv_state[source, :keep] = conv_state[slot, :keep]
                conv_state[slot] = before[slot]
            if defect == "D" and done < tokens <= SHORT:
                conv_state[slot] = before[slot]
            if defect == "E" and done < tokens and done < keep <= end:
                conv_state[slot, :keep] = x[end - keep : end].to(conv_state.dtype)
        return y

    return planted


def fails(test: Callable[..., Any], *args: Any) -> bool:
    try:
        test(*args)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("planner", "kinds"), [(DefectA, {"window", "state"}), (DefectB, {"boundary"})])
def test_the_oracle_finds_a_and_b(planner, kinds):
    report = run(480, 1, planner=planner(), num_lanes=16)
    assert {kind for kind, count in report.found.items() if count} >= kinds
    failing = {(case.layout.policy.value, case.layout.mode.value) for case in report.failing}
    assert {policy for policy, _ in failing} == {"slots"}
    assert ("slots", "all") in failing


class NoPagesInsideAPart(PrefillChunker):
    """A prefill stores only its last state."""

    def split(self, *args):
        cut = super().split(*args)
        last = torch.zeros_like(cut.chunk_write)
        last[cut.row_chunk_loc[1:].long() - 1] = 1
        return replace(cut, chunk_write=cut.chunk_write * last)


class ChunksPastBoundaries(PrefillChunker):
    """Chunks are counted from the start of the prompt: vllm #57266."""

    def _num_ends(self, tokens):
        return tokens // self.chunk_size

    def _end(self, index):
        return (index + 1) * self.chunk_size


class ChunksOfTheStep(PrefillChunker):
    """Chunks are counted from the part of the prompt: vllm #34587, #34798."""

    def split(self, starts, computed, table):
        cut = super().split(starts, computed - computed % self.chunk_size, table)
        return cut


class PagesFreedTooEarly(MambaStateManager):
    """Frees the checkpoint although later tokens are only in the ring."""

    def _oldest(self, computed_R, in_prompt_R):
        return super()._oldest(computed_R, np.ones_like(in_prompt_R))


class PagesNeverFreed(MambaStateManager):
    def _oldest(self, computed_R, in_prompt_R):
        return np.zeros_like(computed_R)


class NoPagesForDrafts(MambaStateManager):
    """A decode gets only one slot, and none for the states of its other tokens."""

    def allocate_blocks(self, rows, computed_R, query_lens_R, num_decodes, prompt_lens_R):
        self._max_blocks_per_decode = 1
        super().allocate_blocks(rows, computed_R, query_lens_R, num_decodes, prompt_lens_R)


class HitsWriteTheirPage(MambaStateManager):
    """A request writes to the cached slot that it starts from."""

    def admit(self, row, num_tokens, page):
        super().admit(row, num_tokens, page)
        if page:
            self.pool.hold([page])
            self.table[row, num_tokens // self.block_size] = page


class RunningBlocksArePublished(MambaStateManager):
    """Publishes the running block before it is full."""

    def commit(self, rows, before_R, after_R, prompt_lens_R, key):
        size = self.block_size
        ahead = np.maximum(after_R, -(-after_R // size) * size).astype(np.int32)
        ahead = np.minimum(ahead, self.layout.max_model_len).astype(np.int32)
        super().commit(rows, before_R, ahead, prompt_lens_R, key)


@pytest.mark.parametrize(
    ("member", "planted", "kind", "policies"),
    [
        ("chunker", NoPagesInsideAPart, "boundary", {"slots", "fold"}),
        ("chunker", ChunksPastBoundaries, "boundary", {"slots", "fold"}),
        ("chunker", ChunksOfTheStep, "boundary", {"slots", "fold"}),
        ("pages", PagesFreedTooEarly, "state", {"fold"}),
        ("pages", PagesNeverFreed, "slots", {"slots", "fold"}),
        ("pages", NoPagesForDrafts, "state", {"slots"}),
        ("pages", HitsWriteTheirPage, "boundary", {"slots", "fold"}),
        ("pages", RunningBlocksArePublished, "boundary", {"slots", "fold"}),
    ],
)
def test_the_oracle_finds_what_is_planted_in_what_an_engine_runs(member, planted, kind, policies):
    found: set[str] = set()
    for policy in StatePolicy:
        for drafts in (0, 3):
            layout = CacheLayout(MambaCacheMode.ALL, 5, drafts, 29, policy, 1 + 2 * drafts)
            case = Case(layout, PrefixRetention.of(layout), 3)
            planner = type("Planted", (Planner,), {member: planted})
            sim = simulate(case, 60, planner(), np.random.default_rng(3))
            assert simulate(case, 60, Planner(), np.random.default_rng(3)).found.total() == 0
            found |= {policy.value} if sim.found[kind] else set()
    assert found == policies


@pytest.mark.parametrize("planted", [False, True])
def test_a_fails_m01_and_m02(planted):
    trace = load("test_trace")
    if planted:
        trace.plan_step = step_with_defect_a
    assert fails(trace.test_m02_the_window_is_read_where_the_state_is) is planted
    assert fails(trace.test_m01_m32_all) is planted


@pytest.mark.parametrize("planted", [False, True])
def test_b_fails_m03(planted):
    trace = load("test_trace")
    if planted:
        trace.plan_copy = commit_with_defect_b
    for mode in (trace.MambaCacheMode.ALIGN, trace.MambaCacheMode.ALL):
        assert fails(trace.test_m03_every_boundary_is_stored, mode) is planted


@pytest.mark.parametrize(
    ("defect", "failing"),
    [
        ("", []),
        ("C", [(16, 16, 2), (16, 15, 2)]),
        ("D", [(16, 15, 2), (16, 12, 8)]),
        ("E", [(16, 15, 2), (16, 15, 20), (16, 14, 20)]),
    ],
)
def test_c_d_and_e_fail_m04(make_layer, defect, failing):
    pages = load("test_ops_pages")
    form = SimpleNamespace(causal_conv1d_varlen=convolution(defect), ssd_scan_varlen=ops.ssd_scan_varlen)
    test = pages.test_m04_pages_of_a_prompt_beside_neighbours
    assert [case for case in CASES if fails(test, make_layer, form, *case)] == failing


@pytest.mark.parametrize("defect", ["", "C", "D", "E"])
def test_c_d_and_e_spoil_what_a_layer_says(monkeypatch, defect):
    """Outputs behind hits, not only pages: short parts, and hits at boundaries that such parts have left."""
    monkeypatch.setattr(mixer, "causal_conv1d_varlen", convolution(defect))
    layers = load("test_fold_cache")
    inputs = layers.Inputs([layers.mixer_of(2, 0, width=4)], 2, 0)
    layout = layers.CacheLayout(layers.ALL, 16, 2, layers.LEN, layers.FOLD)
    cache = layers.FoldCache(layout, inputs.mixers, num_slots=12, num_rows=4, chunk_size=8)
    # Request 0 makes the page of 16 tokens in parts; request 1 is its neighbour; row 3 begins with request 0's page.
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 8, 9]], dtype=torch.int32)
    xbc, dt, want = (torch.cat((t, t[:1])) for t in (inputs.xbc, inputs.dt, inputs.alone()[0]))
    n = torch.tensor([0, 0, 16])
    worst = 0.0

    def step(*parts: tuple[int, int]) -> None:
        nonlocal worst
        who, lens = [i for i, _ in parts], [q for _, q in parts]
        at = [slice(int(n[i]), int(n[i]) + q) for i, q in parts]
        planned = cache.step(table[who], [1 + i for i in who], n[who], lens)
        fed = (torch.cat([t[i, span] for i, span in zip(who, at, strict=True)]) for t in (xbc, dt))
        y = planned.mix(0, *fed)
        truth = torch.cat([want[i, span] for i, span in zip(who, at, strict=True)])
        worst = max(worst, float((y - truth).abs().nan_to_num(9.0).max()))
        n[who] = planned.commit(lens)

    step((1, 3), (0, 14))
    step((1, 5), (0, 2 if defect == "C" else 6 if defect == "D" else 20))
    cache.admit([3], [16])
    step((1, 4), (2, 2))
    step((0, 3), (2, 6))
    step((1, 4), (2, 4))
    assert (worst > 1e-6) is bool(defect)
