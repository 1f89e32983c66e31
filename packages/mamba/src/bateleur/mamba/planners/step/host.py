"""`plan_step` in numpy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.mamba.planners.plans import SlotPlan
from bateleur.mamba.planners.shared.host import INT, arrays, require_room, row_starts
from bateleur.mamba.spec import CacheLayout, MambaCacheMode


def plan_step(
    layout: CacheLayout,
    plan: SlotPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None,
    prev_col: Tensor | None,
) -> None:
    """See `bateleur.mamba.planners.plan_step`."""
    ssm_read, ssm_write, conv_read, offset, conv_write, run = arrays(plan)
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
    if np.count_nonzero(
        tokens < np.array(width)
    ):  # fewer tokens than states: prompts, and steps without drafts
        written *= tokens > steps
    ssm_write.T[...] = written
    conv_write[...] = written[0]


@lru_cache(64)
def _offsets(width: int) -> NDArray[np.int64]:
    """(1 + width,) accepted - 1 of the counts 0 to `width`, of which 0 stands for all below."""
    return np.arange(-1, width).clip(0)


@lru_cache(64)
def _steps(width: int) -> NDArray[np.int64]:
    """(width, 1) tokens of a step before each."""
    return np.arange(width)[:, None]
