"""Plans and commits under SLOTS, in the modes that keep boundaries. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.mamba import (
    CacheLayout,
    CopyPlan,
    Mamba2,
    MambaCacheMode,
    MambaStateManager,
    PrefixRetention,
    RequestStates,
    SlotPlan,
    StatePolicy,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)
from oracle.pool import Pool

MAX_LEN = 64
MODES = [MambaCacheMode.ALIGN, MambaCacheMode.ALL]


def layout(drafts: int = 2, block: int = 4, mode: MambaCacheMode = MambaCacheMode.ALL) -> CacheLayout:
    return CacheLayout(mode, MAX_LEN if mode is MambaCacheMode.NONE else block, drafts, MAX_LEN)


def table_of(layout: CacheLayout, rows: int) -> Tensor:
    """Row r owns slots 100 (r + 1) + column, so that a slot shows whose it is."""
    return (100 * torch.arange(1, rows + 1)[:, None] + torch.arange(layout.columns())).int()


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values)


def as_lists(plan: SlotPlan | CopyPlan) -> dict[str, list]:
    return {field.name: getattr(plan, field.name).tolist() for field in fields(plan)}


@pytest.mark.parametrize("mode", MODES)
def test_m01_shapes_count_requests(mode):
    # The read anchor is the column the last step wrote, and nothing is sized by tokens. vllm #39809.
    kind = layout(mode=mode)
    args = (kind, table_of(kind, 5), i32(6, 7, 0, 40, 9), i32(3, 3, 9, 1, 0))
    plan = plan_step(*args, i64(1, 1, 1, 2, 1), prev_col=i64(1, 2, -1, 9, 0))
    assert plan.ssm_write.shape == (5, 3)
    assert {getattr(plan, f.name).shape for f in fields(plan) if f.name != "ssm_write"} == {(5,)}
    assert as_lists(plan) == {
        "ssm_read": [101, 202, 0, 410, 0],
        "ssm_write": [[102, 103, 104], [202, 203, 204], [302, 303, 304], [410, 0, 0], [0, 0, 0]],
        "conv_read": [101, 202, 0, 409, 0],
        "conv_offset": [0, 0, 0, 1, 0],
        "conv_write": [102, 202, 302, 410, 0],
        "run_col": [2, 2, 2, 10, 0],
    }
    commit = plan_copy(*args, i32(2, 2, 0, 0, 0), i64(1, 1, 1, 1, 0), plan)
    assert {getattr(commit, f.name).shape for f in fields(commit)} == {(5,)}


@pytest.mark.parametrize("mode", [*MODES, MambaCacheMode.NONE])
@pytest.mark.parametrize(("block", "longest", "drafts"), [(4, 64, 2), (9, 37, 7), (16, 65, 0)])
def test_m01_what_vllm_calls_otherwise_has_its_shape(mode, block, longest, drafts):
    # The table of names on the front page: rows are requests, padded ones counted, and tables have room for drafts.
    none = mode is MambaCacheMode.NONE
    kind = CacheLayout(mode, longest if none else block, drafts, longest)
    spec = Mamba2(2, 3, 4, 1, num_speculative_tokens=drafts)
    state_indices_tensor_d = table_of(kind, 5)
    blocks = 1 if none else -(-longest // block)
    assert state_indices_tensor_d.shape == (5, blocks + spec.num_speculative_blocks)
    rows = (kind, state_indices_tensor_d, i32(9, 8, 0, 0, 0), i32(1 + drafts, 1, 9, 0, 0))
    plan = plan_step(*rows, i64(1, 1, 1, 1, 1), prev_col=i64(0, 0, -1, -1, -1))
    kept = plan_copy(*rows, i32(drafts, 0, 0, 0, 0), i64(1, 1, 1, 1, 1), plan)
    assert plan.ssm_write.shape == (5, 1 + drafts)
    block_idx_last_scheduled_token, prev_step = plan.run_col, kept.prev_col
    assert block_idx_last_scheduled_token.shape == (5,)
    assert prev_step.tolist() == ([0] * 5 if none else block_idx_last_scheduled_token.tolist())
    if not none:
        last = [(n - 1) // block if n else 0 for n in (10 + drafts, 9, 9, 0, 0)]
        assert block_idx_last_scheduled_token.tolist() == last
    page = (Path(__file__).parents[1] / "README.md").read_text()
    names = ("state_indices_tensor_d", "block_idx_last_scheduled_token", "num_accepted_tokens")
    assert all(f"`{name}`" in page for name in (*names, f"{names[1]}_prev_step"))


@pytest.mark.parametrize("mode", [*MODES, MambaCacheMode.NONE])
def test_m05_garbage_in_padded_rows_changes_nothing(mode):
    # vllm #41841, #41873, #42947: what is stale in a padded row, and a consumer that looks at it.
    kind = layout(mode=mode)
    computed, tokens, drafts = i32(6, 8, 17), i32(3, 2, 3), i32(2, 1, 2)
    accepted, prev, new = i64(2, 1, 3), i64(2, 2, 4), i64(3, 1, 2)
    table = table_of(kind, 3)
    plan = plan_step(kind, table, computed, tokens, accepted, prev_col=prev)
    commit = plan_copy(kind, table, computed, tokens, drafts, new, plan)
    tail = i32(9000, -7, 64, 63, 1)
    padded = (kind, torch.cat((table, table_of(kind, 5))), torch.cat((computed, tail)))
    lens, stale = torch.cat((tokens, i32(*[0] * 5))), i64(99, -3, 0, 7, 2)
    wide = plan_step(*padded, lens, torch.cat((accepted, stale)), prev_col=torch.cat((prev, 900 * stale)))
    done = plan_copy(*padded, lens, torch.cat((drafts, tail)), torch.cat((new, stale)), wide)
    for small, large in ((plan, wide), (commit, done)):
        for name, value in as_lists(small).items():
            got = getattr(large, name)
            if name == "accepted":
                assert got.tolist() == [*value, 1, 1, 1, 1, 1]
            elif len(value):
                assert got[:3].tolist() == value
                assert not got[3:].any()


@pytest.mark.parametrize("mode", MODES)
def test_m09_without_an_anchor_the_last_tokens_block_is_read(mode):
    # vllm #52317: the index of the previous step was None. A hit of 8 tokens, then a step of one token or of several.
    kind = layout(mode=mode)
    args = (kind, table_of(kind, 3), i32(8, 8, 9), i32(1, 3, 3))
    plans = [plan_step(*args), plan_step(*args, i64(1, 1, 1), prev_col=i64(-1, -1, -1))]
    for plan in plans:
        assert (plan.ssm_read.tolist(), plan.conv_read.tolist()) == ([101, 201, 302], [101, 201, 302])
        assert not plan.conv_offset.any()


def test_m10_rows_of_one_token_in_a_mixed_batch():
    # vllm #46424, #47428: the single token at the end of a prompt, no drafts, and a full step side by side; all of them
    # have an accepted count and an anchor.
    kind = layout()
    plan = plan_step(kind, table_of(kind, 3), i32(9, 9, 9), i32(1, 3, 1), i64(3, 2, 1), prev_col=i64(2, 2, 2))
    assert plan.ssm_read.tolist() == [104, 203, 302]
    assert plan.conv_offset.tolist() == [2, 1, 0]
    assert plan.ssm_write.tolist() == [[102, 0, 0], [202, 203, 204], [302, 0, 0]]


def test_m14_groups_with_other_block_sizes_have_other_anchors():
    # vllm #53142 and its kin: a state index seeded with another group's block size runs off the table. M06 (#34865):
    # builds of two groups interleave, in buffers of their own.
    small, large = layout(block=4), layout(block=16)
    computed, tokens, accepted = i32(60, 30), i32(3, 3), i64(2, 3)
    out = {kind: SlotPlan.allocate(kind, 2, "cpu") for kind in (small, large)}
    for kind, prev in ((small, i64(15, 7)), (large, i64(3, 1)), (small, i64(15, 7))):
        plan_step(kind, table_of(kind, 2), computed, tokens, accepted, out[kind], prev_col=prev)
    assert out[small].run_col.tolist() == [15, 8]
    assert out[large].run_col.tolist() == [3, 2]
    assert out[large].ssm_read.tolist() == [104, 203]
    assert out[small].ssm_read.tolist() == [116, 209]


@pytest.mark.parametrize("mode", MODES)
def test_m15_a_step_that_ends_on_a_boundary_stays_in_its_block(mode):
    # vllm #57605: tokens looked ahead at the end of a page changed what was allocated.
    kind = layout(mode=mode)
    plan = plan_step(kind, table_of(kind, 1), i32(9), i32(3), prev_col=i64(2))
    assert plan.run_col.tolist() == [2]
    for num_decodes, columns in ((1, [2, 3, 4]), (0, [2])):
        pages = MambaStateManager(Pool(5), 1, kind, PrefixRetention.of(kind))
        pages.allocate_blocks(
            np.zeros(1, np.int64), *np.array([[9], [3]], np.int32), num_decodes, np.array([12], np.int32)
        )
        assert np.flatnonzero(pages.table[0]).tolist() == columns


@pytest.mark.parametrize("mode", [*MODES, MambaCacheMode.NONE])
def test_m17_a_step_without_drafts_reads_what_the_last_one_accepted(mode):
    # vllm #56531, #39273: no drafts in the batch, so the path without speculation was taken and read column 0.
    kind = layout(mode=mode)
    anchor = 0 if mode is MambaCacheMode.NONE else 3
    plan = plan_step(kind, table_of(kind, 2), i32(13, 13), i32(1, 1), i64(3, 3), prev_col=i64(3, 3))
    assert plan.ssm_read.tolist() == [100 + anchor + 2, 200 + anchor + 2]
    assert plan.conv_read.tolist() == [100 + anchor, 200 + anchor]
    assert plan.conv_offset.tolist() == [2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_m18_a_prompts_end_may_carry_drafts(mode):
    # vllm #55178: the last 2 tokens of a prompt and a draft, token by token; the draft is rejected. Blocks end at 8.
    kind = layout(mode=mode)
    args = (kind, table_of(kind, 1), i32(7), i32(3))
    plan = plan_step(*args, prev_col=i64(1))
    commit = plan_copy(*args, i32(2), i64(2), plan)
    # The boundary is the first token's, in column 2; its own column is 1; the next step reads column 2 + 1.
    assert plan.run_col.tolist() == [2]
    assert as_lists(commit) == {
        "conv_src": [102],
        "conv_bias": [0],
        "ssm_src": [102],
        "dst": [101],
        "accepted": [2],
        "prev_col": [2],
    }


class NoValues(TorchDispatchMode):
    """Refuses what would bring a value of a tensor to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "synchronises with the device"
        assert func is not torch.ops.aten.nonzero.default, "synchronises with the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", list(MambaCacheMode))
def test_m23_plans_need_no_value_on_the_host(mode):
    # vllm #43955: accepted counts that existed on the device alone skipped the commit.
    n, tokens, drafts, base = i32(6, 13), i32(3, 3), i32(2, 2), i64(4, 12)
    ones, flags = i64(1, 2), torch.tensor([True, False])
    with NoValues():
        kind = layout(mode=mode)
        args = (kind, table_of(kind, 2), n, tokens)
        plan_copy(*args, drafts, ones, plan_step(*args, ones, prev_col=ones))
        kind = CacheLayout(mode, kind.block_size, 2, MAX_LEN, StatePolicy.FOLD)
        replay = plan_replay(kind, table_of(kind, 2), n, tokens, base, ones)
        plan_fold(kind, replay, n, tokens, ones, flush=flags, scanned=~flags)
        states = RequestStates(3, "cpu")
        states.scatter(ones, states.gather(ones).accepted)
    with NoValues(), pytest.raises(AssertionError, match="synchronises"):
        ones[0].item()


def test_m27_more_rows_than_slots():
    # vllm #34571, #34094: a captured batch larger than the cache; every row but the first is padding.
    kind = layout()
    table = torch.zeros((16, kind.columns()), dtype=torch.int32)
    table[0, :4] = i32(1, 2, 3, 4)
    tokens = torch.zeros(16, dtype=torch.int32)
    tokens[0] = 3
    plan = plan_step(kind, table, torch.zeros(16, dtype=torch.int32), tokens, torch.ones(16).long())
    assert plan.ssm_write[0].tolist() == [1, 2, 3]
    assert plan.ssm_write.max() <= 4
    assert all(not getattr(plan, field.name)[1:].any() for field in fields(plan))


@pytest.mark.parametrize("wrong", [0, -1, 9])
@pytest.mark.parametrize("mode", [*MODES, MambaCacheMode.NONE])
def test_m31_accepted_counts_are_held_to_their_range(mode, wrong):
    # vllm #50021: an index without bounds.
    kind, right = layout(mode=mode), 3 if wrong > 0 else 1
    args = (kind, table_of(kind, 1), i32(9), i32(3))
    got, want = (plan_step(*args, i64(a), prev_col=i64(2)) for a in (wrong, right))
    assert as_lists(got) == as_lists(want)
    done = [plan_copy(*args, i32(2), i64(a), want) for a in (wrong, right)]
    assert as_lists(done[0]) == as_lists(done[1])


def test_m31_no_more_than_was_drafted_is_accepted():
    kind = layout(mode=MambaCacheMode.NONE)
    args = (kind, table_of(kind, 2), i32(9, 9), i32(2, 30))
    assert plan_copy(*args, i32(1, 0), i64(3, 3), plan_step(*args)).accepted.tolist() == [2, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_boundary_at_the_first_token_needs_no_copy_where_it_lies(mode):
    # Steps of one token: the state of token 8 is written to column 1, where it belongs.
    kind = layout(mode=mode)
    args = (kind, table_of(kind, 2), i32(7, 6), i32(1, 1))
    commit = plan_copy(*args, i32(0, 0), i64(1, 1), plan_step(*args, prev_col=i64(1, 1)))
    assert not commit.dst.any()
    assert commit.accepted.tolist() == [1, 1]
    assert commit.prev_col.tolist() == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_the_column_may_go_back(mode):
    # Three tokens from 6 run in column 2; one survives, and the next step has one token, in column 1. Not a bug.
    kind = layout(mode=mode)
    args = (kind, table_of(kind, 1), i32(7), i32(1))
    plan = plan_step(*args, i64(1), prev_col=i64(2))
    assert (plan.ssm_read.item(), plan.conv_write.item(), plan.run_col.item()) == (102, 101, 1)


@pytest.mark.parametrize("mode", [*MODES, MambaCacheMode.NONE])
def test_m26_buffers_keep_their_addresses(mode):
    # vllm #40648.
    kind = layout(mode=mode)
    plan, commit = SlotPlan.allocate(kind, 2, "cpu"), CopyPlan.allocate(2, "cpu")
    before = [getattr(p, f.name).data_ptr() for p in (plan, commit) for f in fields(p)]
    for field in fields(commit):
        getattr(commit, field.name).fill_(77)
    for computed in (i32(6, 13), i32(0, 7)):
        args = (kind, table_of(kind, 2), computed, i32(3, 3))
        assert plan_step(*args, i64(2, 3), plan, prev_col=i64(1, 4)) is plan
        assert plan_copy(*args, i32(2, 2), i64(3, 1), plan, commit) is commit
        fresh = plan_step(*args, i64(2, 3), prev_col=i64(1, 4))
        assert as_lists(plan) == as_lists(fresh)
        assert as_lists(commit) == as_lists(plan_copy(*args, i32(2, 2), i64(3, 1), fresh))
    assert before == [getattr(p, f.name).data_ptr() for p in (plan, commit) for f in fields(p)]


def test_plans_for_the_other_policy_are_refused():
    kind = CacheLayout(MambaCacheMode.ALL, 4, 2, MAX_LEN, StatePolicy.FOLD)
    with pytest.raises(ValueError, match="layout has the policy 'fold'; this plan is for 'slots'"):
        plan_step(kind, table_of(kind, 1), i32(0), i32(3))
    kind = layout()
    with pytest.raises(ValueError, match="needs 18"):
        plan_step(kind, table_of(kind, 1)[:, :-1], i32(0), i32(3))
    plan = plan_step(kind, table_of(kind, 1), i32(0), i32(3))
    with pytest.raises(ValueError, match=r"num_drafts has shape \(2,\)"):
        plan_copy(kind, table_of(kind, 1), i32(0), i32(3), i32(2, 2), i64(1), plan)
    args = (kind, table_of(kind, 2), i32(0, 0), i32(3, 3), i32(2, 2), i64(1, 1))
    with pytest.raises(ValueError, match=r"plan has shape \(1,\); the table has 2 rows"):
        plan_copy(*args, plan)
    out = CopyPlan.allocate(5, "cpu")
    address = out.accepted.data_ptr()
    with pytest.raises(ValueError, match=r"out has shape \(5,\); the table has 2 rows"):
        plan_copy(*args, plan_step(*args[:4]), out)
    assert (len(out.accepted), out.accepted.data_ptr()) == (5, address)  # torch would have resized it


def test_m07_a_resumed_request_starts_over():
    # vllm #35157: preempted at 30 tokens, resumed with a hit of 8, and the column of before was read.
    kind = layout()
    states, row = RequestStates(3, "cpu"), i64(2)
    states.admit([2])
    states.scatter(row, i64(3), prev_col=i64(8))
    states.admit([2], [8])
    seen = states.gather(row)
    plan = plan_step(kind, table_of(kind, 1), i32(8), i32(3), seen.accepted, prev_col=seen.prev_col)
    assert (plan.ssm_read.item(), plan.conv_read.item(), plan.conv_offset.item()) == (101, 101, 0)
