"""Plans of replay and fold. Tests mNN are those of the bug catalogue."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    FoldPlan,
    MambaCacheMode,
    ReplayPlan,
    RequestStates,
    StatePolicy,
    plan_fold,
    plan_replay,
)

MAX_LEN = 64


def layout(drafts: int = 2, block: int = 4, ring: int = 5, mode: MambaCacheMode = MambaCacheMode.ALL) -> CacheLayout:
    block = MAX_LEN if mode is MambaCacheMode.NONE else block
    return CacheLayout(mode, block, drafts, MAX_LEN, StatePolicy.FOLD, ring)


def table_of(layout: CacheLayout, rows: int) -> Tensor:
    """Row r owns slots 100 (r + 1) + column."""
    return (100 * torch.arange(1, rows + 1)[:, None] + torch.arange(layout.columns())).int()


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values)


def as_lists(plan: ReplayPlan | FoldPlan) -> dict[str, list]:
    return {field.name: getattr(plan, field.name).tolist() for field in fields(plan)}


def test_golden():
    # Nothing computed; a hit of 8 tokens; a boundary's checkpoint and a ring; one inside a block; a padded row.
    kind = layout()
    args = (i32(0, 8, 11, 14, 0), i32(3, 3, 3, 1, 0))
    replay = plan_replay(kind, table_of(kind, 5), *args, i64(0, 8, 8, 13, 0), i64(1, 1, 3, 2, 1))
    assert as_lists(replay) == {
        "slot": [0, 201, 301, 403, 0],
        "fold_slot": [100, 202, 302, 403, 500],
        "ring_start": [0, 8, 8, 13, 0],
        "ring_len": [0, 0, 3, 1, 0],
        "conv_offset": [0, 0, 2, 1, 0],
    }
    # Three tokens that no boundary follows leave a ring that could not take three more: folded. One token of three
    # stays. From 11, two tokens pass 12: folded up to there. The single token stays as well.
    done = plan_fold(kind, replay, *args, i64(3, 1, 2, 1, 0))
    assert as_lists(done) == {
        "dst": [100, 0, 302, 0, 0],
        "count": [3, 0, 4, 0, 0],
        "page_offset": [2, 0, 0, 0, 0],
        "base": [3, 8, 12, 13, 0],
        "accepted": [3, 1, 2, 1, 0],
    }


def test_m33_a_prompts_step_leaves_an_empty_ring():
    # Six tokens of a new prompt; one token of a prompt that goes on; one that ends it; the first of a block that does.
    kind = layout()
    args = (i32(0, 9, 9, 7), i32(6, 1, 1, 1))
    replay = plan_replay(kind, table_of(kind, 4), *args, i64(0, 9, 9, 7), i64(1, 1, 1, 1))
    masks = {"flush": torch.tensor([False, True, False, True]), "scanned": torch.tensor([True, False, False, False])}
    done = plan_fold(kind, replay, *args, i64(0, 0, 0, 0), **masks)
    assert as_lists(done) == {
        "dst": [0, 202, 0, 401],
        "count": [0, 1, 0, 1],
        "page_offset": [0, 0, 0, 0],
        "base": [6, 10, 9, 8],
        "accepted": [1, 1, 1, 1],
    }


def test_a_flush_never_skips_a_boundary():
    # Three tokens from 7 end behind 8: the page is that of 8, and the two behind it stay.
    kind = layout()
    args = (i32(7), i32(3))
    replay = plan_replay(kind, table_of(kind, 1), *args, i64(7), i64(1))
    done = plan_fold(kind, replay, *args, i64(3), flush=torch.tensor([True]))
    assert (done.base.item(), done.dst.item(), done.page_offset.item()) == (8, 101, 0)


@pytest.mark.parametrize("mode", list(MambaCacheMode))
def test_m05_garbage_in_padded_rows_changes_nothing(mode):
    kind = layout(mode=mode)
    computed, tokens = i32(6, 11, 17), i32(3, 2, 3)
    base, accepted, new = i64(6, 8, 16), i64(2, 1, 3), i64(3, 2, 1)
    plan = plan_replay(kind, table_of(kind, 3), computed, tokens, base, accepted)
    done = plan_fold(kind, plan, computed, tokens, new)
    tail, stale = i32(9000, -7, 64, 63, 1), i64(99, -3, 0, 7, 2)
    args = (torch.cat((computed, tail)), torch.cat((tokens, i32(*[0] * 5))))
    wide = plan_replay(kind, table_of(kind, 8), *args, torch.cat((base, 900 * stale)), torch.cat((accepted, stale)))
    folded = plan_fold(
        kind, wide, *args, torch.cat((new, stale)), flush=torch.arange(8) > 2, scanned=torch.arange(8) > 8
    )
    for small, large in ((plan, wide), (done, folded)):
        for name, value in as_lists(small).items():
            assert getattr(large, name)[:3].tolist() == value
            assert name == "fold_slot" or not getattr(large, name)[3:].any()


@pytest.mark.parametrize("wrong", [0, -1, 9])
def test_m31_accepted_counts_are_held_to_their_range(wrong):
    kind, right = layout(), 3 if wrong > 0 else 1
    args = (i32(9), i32(3))
    replay = plan_replay(kind, table_of(kind, 1), *args, i64(8), i64(1))
    got, want = (plan_fold(kind, replay, *args, i64(a)) for a in (wrong, right))
    assert as_lists(got) == as_lists(want)


def test_m26_buffers_keep_their_addresses():
    kind = layout()
    replay, done = ReplayPlan.allocate(2, "cpu"), FoldPlan.allocate(2, "cpu")
    before = [getattr(p, f.name).data_ptr() for p in (replay, done) for f in fields(p)]
    assert len(set(before)) == len(before)
    masks = {"flush": torch.tensor([True, False]), "scanned": torch.tensor([False, True])}
    for computed in (i32(6, 13), i32(5, 7)):
        args = (computed, i32(1, 9))
        assert plan_replay(kind, table_of(kind, 2), *args, i64(4, 4), i64(2, 1), replay) is replay
        assert plan_fold(kind, replay, *args, i64(1, 1), **masks, out=done) is done
        fresh = plan_replay(kind, table_of(kind, 2), *args, i64(4, 4), i64(2, 1))
        assert as_lists(replay) == as_lists(fresh)
        assert as_lists(done) == as_lists(plan_fold(kind, fresh, *args, i64(1, 1), **masks))
    assert before == [getattr(p, f.name).data_ptr() for p in (replay, done) for f in fields(p)]


def test_m33_a_recycled_row_has_an_empty_ring():
    # vllm #49847: request A ended with a ring of three; B starts in its row from nothing, then C from a hit.
    kind, states, row = layout(), RequestStates(2, "cpu"), i64(1)
    states.admit([1])
    states.scatter(row, i64(3), base=i64(20))
    for hit, slot in ((0, 0), (8, 101)):
        states.admit([1], hit)
        seen = states.gather(row)
        plan = plan_replay(kind, table_of(kind, 1), i32(hit), i32(3), seen.base, seen.accepted)
        assert (plan.slot.item(), plan.ring_len.item(), plan.conv_offset.item()) == (slot, 0, 0)


@pytest.mark.parametrize("drafts", range(8))
def test_one_fold_a_step_is_enough(drafts):
    # The smallest blocks and rings a layout allows, every checkpoint and length a step may meet, every acceptance.
    kind = layout(drafts, block=1 + drafts, ring=1 + 2 * drafts)
    rows = [
        (q + n, q + b, count, accepted)
        for q in (0, 1 + drafts, 5 * (1 + drafts))
        for n in range(1 + drafts)
        for b in range(n + 1)
        for count in range(1, 2 + drafts)
        for accepted in range(1, count + 1)
        if n - b + 1 + drafts <= kind.ring_capacity
    ]
    n, base, count, accepted = torch.tensor(rows).T
    replay = plan_replay(kind, table_of(kind, len(rows)), n, count, base, torch.ones_like(n))
    done = plan_fold(kind, replay, n, count, accepted)
    after, size = n + accepted, kind.block_size
    left = after - done.base
    assert (left >= 0).all()
    assert (left + 1 + drafts <= kind.ring_capacity).all()
    assert (done.base >= after // size * size).all()  # no boundary is left behind
    folded = done.dst > 0
    assert torch.equal(folded, done.base > base)
    assert (done.dst % 100)[folded].tolist() == ((done.base - 1) // size)[folded].tolist()
    assert torch.equal(done.count, done.base - base)
    assert (done.page_offset <= drafts).all()
    assert torch.equal(done.page_offset[folded], (done.base - n - 1)[folded])


def test_plans_that_do_not_fit_are_refused():
    kind = CacheLayout(MambaCacheMode.ALL, 4, 2, MAX_LEN)
    with pytest.raises(ValueError, match="layout has the policy 'slots'; this plan is for 'fold'"):
        plan_replay(kind, table_of(kind, 1), i32(0), i32(3), i64(0), i64(1))
    kind = layout()
    with pytest.raises(ValueError, match=r"base has shape \(2,\); the table has 1 rows"):
        plan_replay(kind, table_of(kind, 1), i32(0), i32(3), i64(0, 0), i64(1))
    replay = plan_replay(kind, table_of(kind, 1), i32(0), i32(3), i64(0), i64(1))
    with pytest.raises(ValueError, match=r"accepted has shape \(2,\); the plan has 1 rows"):
        plan_fold(kind, replay, i32(0), i32(3), i64(0, 0))
    rows = (kind, table_of(kind, 3), i32(9, 9, 9), i32(3, 3, 3), i64(8, 8, 8), i64(1, 1, 1))
    with pytest.raises(ValueError, match=r"out has shape \(1,\); the table has 3 rows"):
        plan_replay(*rows, ReplayPlan.allocate(1, "cpu"))
    replay, yes = plan_replay(*rows), torch.tensor([True])
    kept = {"computed": i32(9, 9, 9), "query_lens": i32(3, 3, 3), "accepted": i64(1, 1, 1)}
    for name, wrong in (
        ("computed", {"computed": i32(9)}),  # one number would be taken for that of all rows
        ("flush", {"flush": yes}),
        ("scanned", {"scanned": yes}),
        ("out", {"out": FoldPlan.allocate(1, "cpu")}),
    ):
        with pytest.raises(ValueError, match=rf"{name} has shape \(1,\); the plan has 3 rows"):
            plan_fold(kind, replay, **(kept | wrong))
    with pytest.raises(ValueError, match="layout has the policy 'slots'; this plan is for 'fold'"):
        plan_fold(CacheLayout(MambaCacheMode.ALL, 4, 2, MAX_LEN), replay, **kept)
