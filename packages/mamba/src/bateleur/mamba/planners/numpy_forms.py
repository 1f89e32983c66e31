"""Numpy forms of the planners, for eager steps on a CPU.

A plan is about thirty operations on one number per request, so the time is that of the calls. The numpy forms take 0.4
to 0.75 of the time of the torch forms, which is 13 to 46 us for 64 rows (`benchmarks/mamba.py`). Inputs, factors and
constants are int64 arrays, so that numpy does not convert operands. The torch forms are the specification and have the
comments.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.spec import CacheLayout, MambaCacheMode

INT = np.int64
ZERO, ONE = np.array(0), np.array(1)


def require_room(layout: CacheLayout, after: NDArray[np.int64]) -> None:
    """Raise ValueError if a request exceeds `max_model_len`: `take` would read the table of the next request."""
    if np.count_nonzero(after > np.array(layout.max_model_len)):
        raise ValueError(
            f"computed + query_lens is {after.max()} in some row; it must be at most max_model_len = "
            f"{layout.max_model_len}"
        )


@lru_cache(64)
def row_starts(rows: int, columns: int) -> NDArray[np.int64]:
    """Return the index (rows,) of each row's first entry in the flattened block table."""
    return np.arange(0, rows * columns, columns)


def plan_step(
    layout: CacheLayout,
    plan: SlotPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None,
    prev_col: Tensor | None,
) -> None:
    """Compute the state slots that a step under SLOTS (a slot per draft) reads and writes, in numpy, into `plan`."""
    ssm_read, ssm_write, conv_read, offset, conv_write, run = plan.arrays()
    tokens = query_lens.numpy().astype(INT)
    valid = np.sign(tokens)
    n = computed.numpy() * valid
    has = np.sign(n)
    width = ssm_write.shape[1]
    if accepted is None:
        offset.fill(0)
    else:
        np.multiply(_offsets(width).take(accepted.numpy(), mode="clip"), has, offset)
    anchor = first = starts = row_starts(*table.shape)
    if layout.mode is MambaCacheMode.NONE:
        run.fill(0)
    else:
        block_size = np.array(layout.block_size)
        anchor = (n - has) // block_size
        n += tokens
        require_room(layout, n)
        n -= valid
        np.floor_divide(n, block_size, run)
        if prev_col is not None:
            anchor = np.maximum(anchor, prev_col.numpy()) * has
        anchor = anchor + starts
        first = run + starts
    flat = table.numpy().reshape(-1)
    np.multiply(flat.take(anchor), has, conv_read)
    np.multiply(flat.take(anchor + offset), has, ssm_read)
    steps = _steps(width)
    written = flat.take(first + steps)
    if np.count_nonzero(tokens < np.array(width)):  # prefills, and steps without drafts
        written *= tokens > steps
    ssm_write.T[...] = written
    conv_write[...] = written[0]


@lru_cache(64)
def _offsets(width: int) -> NDArray[np.int64]:
    """Return conv offsets (1 + width,): max(accepted - 1, 0) for accepted = 0 to `width`."""
    return np.arange(-1, width).clip(0)


@lru_cache(64)
def _steps(width: int) -> NDArray[np.int64]:
    """Return the indices 0 to width - 1 of the tokens of a step, (width, 1)."""
    return np.arange(width)[:, None]


def plan_copy(
    layout: CacheLayout,
    out: CopyPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    plan: SlotPlan,
) -> None:
    """Compute the state copies to block boundaries after a step under SLOTS (a slot per draft), into `out`."""
    conv_src, conv_bias, ssm_src, dst, kept, run = out.arrays()
    new, drafts = query_lens.numpy().astype(INT), num_drafts.numpy().astype(INT)
    valid = np.sign(new)
    extra = np.maximum(accepted.numpy(), ONE) - ONE
    extra = np.minimum(extra, drafts) * valid
    np.add(extra, ONE, kept)
    if layout.mode is MambaCacheMode.NONE:
        for unused in (conv_src, conv_bias, ssm_src, dst, run):
            unused.fill(0)
        return
    np.copyto(run, plan.arrays()[-1])
    new += computed.numpy()
    new -= drafts
    new += extra
    block_size = np.array(layout.block_size)
    bias = extra - new % block_size
    crossed = bias + valid > ZERO  # bias >= 0, except in padded rows, where bias is never above 0
    if not np.count_nonzero(crossed):
        for unused in (conv_src, conv_bias, ssm_src, dst):
            unused.fill(0)
        return
    column = new // block_size - ONE
    in_place = column == run
    in_place &= crossed
    np.putmask(kept, in_place, ONE)
    in_place &= bias == ZERO
    moved = (crossed ^ in_place).astype(INT)
    np.multiply(bias, moved, conv_bias)
    column *= moved
    flat, starts = table.numpy().reshape(-1), row_starts(*table.shape)
    entry = run + starts
    np.multiply(flat.take(entry), moved, conv_src)
    np.multiply(flat.take(entry + conv_bias), moved, ssm_src)
    np.multiply(flat.take(column + starts), moved, dst)


def plan_replay(
    layout: CacheLayout,
    plan: ReplayPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
) -> None:
    """Compute the saved state, ring and conv window that a step under FOLD starts from, in numpy, into `plan`."""
    slot, fold_slot, ring_start, ring_len, offset = plan.arrays()
    lens = query_lens.numpy()
    valid = np.sign(lens).astype(INT)
    n = computed.numpy() * valid
    require_room(layout, n + lens)
    np.multiply(base.numpy(), valid, ring_start)
    np.subtract(n, ring_start, ring_len)
    np.multiply(accepted.numpy(), valid, offset)
    np.subtract(offset, valid, offset)
    has = np.sign(ring_start)
    flat, starts, block_size = (table.numpy().reshape(-1), row_starts(*table.shape), np.array(layout.block_size))
    np.multiply(flat.take((ring_start - has) // block_size + starts), has, slot)
    np.copyto(fold_slot, flat.take(n // block_size + starts))


def plan_fold(
    layout: CacheLayout,
    out: FoldPlan,
    plan: ReplayPlan,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor,
    flush: Tensor | None,
    scanned: Tensor | None,
) -> None:
    """Compute which ring entries a step under FOLD adds to saved states, in numpy, into `out`."""
    dst, count, offset, base, kept = out.arrays()
    _, fold_slot, ring_start, ring_len, _ = plan.arrays()
    tokens, n = query_lens.numpy(), computed.numpy().astype(INT)
    np.maximum(accepted.numpy(), ONE, out=kept)
    np.minimum(kept, tokens, out=kept)
    ring = ring_len + kept
    keep = n + kept
    keep %= np.array(layout.block_size)
    np.minimum(keep, ring, out=keep)
    full = keep > np.array(layout.ring_capacity - 1 - layout.num_speculative_tokens)
    if flush is not None:
        full |= flush.numpy() & (keep == ring)
    np.putmask(keep, full, ZERO)
    np.subtract(ring, keep, count)
    if scanned is None:
        np.add(ring_start, count, base)
    else:
        prompts = scanned.numpy()
        np.putmask(kept, prompts, ONE)
        np.putmask(count, prompts, ZERO)
        np.add(ring_start, count, base)
        np.putmask(base, prompts, n + tokens)
    folds = np.sign(count)
    np.multiply(fold_slot, folds, dst)
    np.subtract(kept, keep, offset)
    np.subtract(offset, ONE, offset)
    np.multiply(offset, folds, offset)
