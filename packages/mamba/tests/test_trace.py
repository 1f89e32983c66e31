"""One request, step by step, in every mode and policy: blocks of 4, 2 drafts, a prompt of 4 + 2 tokens, 8 decodes.

The figures are those of the classic designs, worked out by hand: `n` is before the step, columns count blocks, a state
is named by the tokens it has seen, and None is what rejected tokens left. They are tests M01 and M32 of the bug
catalogue: vllm #39809, #43587, #43628.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bateleur.mamba import (
    CacheLayout,
    MambaCacheMode,
    RequestStates,
    StatePolicy,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)

BLOCK, DRAFTS, MAX_LEN = 4, 2, 24
PROMPT = (4, 2)
ACCEPTED = (1, 1, 3, 2, 1, 3, 3, 1)
STARTS = (6, 7, 8, 11, 13, 14, 17, 20)
ROW = torch.tensor([1])


def layout_of(mode: MambaCacheMode, policy: StatePolicy, ring: int = 16) -> CacheLayout:
    block = MAX_LEN if mode is MambaCacheMode.NONE else BLOCK
    return CacheLayout(mode, block, DRAFTS, MAX_LEN, policy, ring)


def one(value: int) -> Tensor:
    return torch.tensor([value])


@dataclass
class Seen:
    """A decode step under SLOTS; slots are columns + 1, so columns are given back."""

    n: int
    conv_col: int
    offset: int
    ssm_col: int
    run_col: int
    written: list[int | None]
    copy: tuple[int, int, int] | None
    """Source column, destination column, conv bias."""
    carried: int
    states: dict[int, int | None]
    windows: dict[int, int | None]
    """Column to the tokens that a window at offset 0 follows."""


def slots(mode: MambaCacheMode) -> Iterator[Seen]:
    layout = layout_of(mode, StatePolicy.SLOTS)
    table = 1 + torch.arange(layout.columns())[None]
    request = RequestStates(2, "cpu")
    request.admit([1])
    states: dict[int, int | None] = {-1: 0}
    windows: dict[int, int | None] = {-1: 0}
    n = 0
    for count, accepted, scanned in [(q, 1, True) for q in PROMPT] + [(3, a, False) for a in ACCEPTED]:
        before = request.gather(ROW)
        plan = plan_step(layout, table, one(n), one(count), before.accepted, prev_col=before.prev_col)
        ssm_col, conv_col, offset = (int(x) for x in (plan.ssm_read - 1, plan.conv_read - 1, plan.conv_offset))
        assert states[ssm_col] == n
        assert windows[conv_col] is not None
        assert windows[conv_col] + offset == n
        run = int(plan.conv_write) - 1
        if scanned:
            states[run] = windows[run] = n + count
            written: list[int | None] = [n + count]
        else:
            written = [n + i + 1 if i < accepted else None for i in range(count)]
            states |= {int(slot) - 1: state for slot, state in zip(plan.ssm_write[0], written, strict=True)}
            windows[run] = n + 1
        args = (layout, table, one(n), one(count), one(0 if scanned else count - 1), one(accepted), plan)
        commit = plan_copy(*args)
        request.scatter(ROW, commit.accepted, prev_col=commit.prev_col)
        copy = None
        if commit.dst.item():
            src, dst, bias = int(commit.conv_src) - 1, int(commit.dst) - 1, int(commit.conv_bias)
            assert int(commit.ssm_src) - 1 == src + bias
            states[dst] = states[src + bias]
            windows[dst] = windows[src] + bias
            copy = (src, dst, bias)
        if not scanned:
            carried = int(commit.accepted)
            yield Seen(n, conv_col, offset, ssm_col, run, written, copy, carried, dict(states), dict(windows))
        n += count if scanned else accepted


def test_m32_none():
    # n, offset read at, states of the three columns after the step, accepted
    golden = [
        (6, 0, [7, None, None], 1),
        (7, 0, [8, None, None], 1),
        (8, 0, [9, 10, 11], 3),
        (11, 2, [12, 13, None], 2),
        (13, 1, [14, None, None], 1),
        (14, 0, [15, 16, 17], 3),
        (17, 2, [18, 19, 20], 3),
        (20, 2, [21, None, None], 1),
    ]
    seen = list(slots(MambaCacheMode.NONE))
    assert [(s.n, s.offset, [s.states[c] for c in range(3)], s.carried) for s in seen] == golden
    assert all(s.conv_col == s.run_col == 0 and s.ssm_col == s.offset and s.copy is None for s in seen)


def test_m32_align():
    # n, copy before the step, run column, offset read at, states written, copy after it, accepted that is carried.
    # Where the classic design copies the state to the new column first, ours reads it where it is: same source, same
    # bias.
    golden = [
        (6, (1, 2, 0), 2, 0, [7, None, None], None, 1),
        (7, None, 2, 0, [8, None, None], (2, 1, 0), 1),
        (8, None, 2, 0, [9, 10, 11], None, 3),
        (11, (2, 3, 2), 3, 0, [12, 13, None], (3, 2, 0), 2),
        (13, None, 3, 1, [14, None, None], None, 1),
        (14, (3, 4, 0), 4, 0, [15, 16, 17], (4, 3, 1), 3),
        (17, None, 4, 2, [18, 19, 20], (4, 4, 2), 1),
        (20, (4, 5, 0), 5, 0, [21, None, None], None, 1),
    ]
    seen = list(slots(MambaCacheMode.ALIGN))
    for s, (n, moved, run_col, offset, written, copy, carried) in zip(seen, golden, strict=True):
        assert (s.n, s.run_col, s.written, s.copy, s.carried) == (n, run_col, written, copy, carried)
        source = (s.conv_col, s.run_col, s.offset)
        assert source == (moved or (run_col, run_col, offset))
        assert s.ssm_col == s.conv_col + s.offset


def test_m01_m32_all():
    # n, column of the last computed token, anchor, column the state is read from, column of the last scheduled token.
    # The last row's state was in column 6; the copy to column 4, where it is published, brought it to the anchor.
    golden = [
        (6, 1, 1, 1, 2),
        (7, 1, 2, 2, 2),
        (8, 1, 2, 2, 2),
        (11, 2, 2, 4, 3),
        (13, 3, 3, 4, 3),
        (14, 3, 3, 3, 4),
        (17, 4, 4, 6, 4),
        (20, 4, 4, 4, 5),
    ]
    layout = layout_of(MambaCacheMode.ALL, StatePolicy.SLOTS)
    seen = list(slots(MambaCacheMode.ALL))
    assert [(s.n, layout.column(s.n), s.conv_col, s.ssm_col, s.run_col) for s in seen] == golden


def test_m02_the_window_is_read_where_the_state_is():
    # Defect A: at n = 7 the last token's block is column 1, and the step before wrote its window to column 2.
    step = next(s for s in slots(MambaCacheMode.ALL) if s.n == 7)
    assert (step.conv_col, step.ssm_col, step.offset) == (2, 2, 0)


@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, MambaCacheMode.ALL])
def test_m03_every_boundary_is_stored(mode):
    # Defect B: without the copies, columns 1 to 4 end as 6, 9, 14 and 18.
    *_, last = slots(mode)
    assert [last.states[c] for c in range(5)] == [4, 8, 12, 16, 20]
    assert [last.windows[c] for c in range(5)] == [4, 8, 12, 16, 20]


def fold(mode: MambaCacheMode, ring: int) -> Iterator[tuple[int, int, int, dict[int, int]]]:
    """(n, checkpoint, ring length) before each decode step, and the tokens of every column's state after it."""
    layout = layout_of(mode, StatePolicy.FOLD, ring)
    table = 1 + torch.arange(layout.columns())[None]
    request = RequestStates(2, "cpu")
    request.admit([1])
    states = {-1: 0}
    window = n = 0  # `window`: the tokens that the request conv window follows at offset 0
    for count in PROMPT:
        before = request.gather(ROW)
        plan = plan_replay(layout, table, one(n), one(count), before.base, before.accepted)
        assert (states[int(plan.slot) - 1], int(plan.ring_len)) == (n, 0)
        window = states[layout.column(n + count)] = n + count
        args = (layout, plan, one(n), one(count), one(1))
        done = plan_fold(*args, scanned=torch.tensor([True]))
        assert not done.dst.any()
        request.scatter(ROW, done.accepted, base=done.base)
        n += count
    for accepted in ACCEPTED:
        before = request.gather(ROW)
        plan = plan_replay(layout, table, one(n), one(3), before.base, before.accepted)
        base, length = int(plan.ring_start), int(plan.ring_len)
        assert states[int(plan.slot) - 1] == base == n - length
        assert window + int(plan.conv_offset) == n
        window = n + 1
        done = plan_fold(layout, plan, one(n), one(3), one(accepted))
        request.scatter(ROW, done.accepted, base=done.base)
        if done.dst.item():
            count = int(done.count)
            assert base + count == int(done.base) == window + int(done.page_offset)
            assert count <= length + accepted
            states[int(done.dst) - 1] = base + count
        yield n, base, length, dict(states)
        n += accepted


@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, MambaCacheMode.ALL])
def test_m32_fold(mode):
    seen = list(fold(mode, ring=6))
    golden = [(6, 0), (6, 1), (8, 0), (8, 3), (12, 1), (12, 2), (16, 1), (20, 0)]
    assert [(n, base, length) for n, base, length, _ in seen] == [
        (n, *at) for n, at in zip(STARTS, golden, strict=True)
    ]
    assert [seen[-1][3][c] for c in range(5)] == [4, 8, 12, 16, 20]


def test_m32_fold_none():
    # One column, folded in place when the ring of 6 could not take another 3 tokens: after 4 or more are in it.
    seen = list(fold(MambaCacheMode.NONE, ring=6))
    golden = [(6, 0), (6, 1), (6, 2), (11, 0), (11, 2), (11, 3), (17, 0), (17, 3)]
    assert [(n, base, length) for n, base, length, _ in seen] == [
        (n, *at) for n, at in zip(STARTS, golden, strict=True)
    ]
    assert set(seen[-1][3]) == {-1, 0}
