"""`plan_copy` in numpy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, SlotPlan
from bateleur.mamba.planners.shared.host import INT, ONE, ZERO, arrays, row_starts
from bateleur.mamba.spec import CacheLayout, MambaCacheMode


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
    """See `bateleur.mamba.planners.plan_copy`."""
    conv_src, conv_bias, ssm_src, dst, kept, run = arrays(out)
    new, drafts = query_lens.numpy().astype(INT), num_drafts.numpy().astype(INT)
    valid = np.sign(new)
    extra = np.maximum(accepted.numpy(), ONE) - ONE
    extra = np.minimum(extra, drafts) * valid
    np.add(extra, ONE, kept)
    if layout.mode is MambaCacheMode.NONE:
        for unused in (conv_src, conv_bias, ssm_src, dst, run):
            unused.fill(0)
        return
    np.copyto(run, arrays(plan)[-1])
    new += computed.numpy()
    new -= drafts
    new += extra
    block_size = np.array(layout.block_size)
    bias = extra - new % block_size
    crossed = bias + valid > ZERO  # bias >= 0, and not in padded rows, where it is never above 0
    if not np.count_nonzero(crossed):
        for unused in (conv_src, conv_bias, ssm_src, dst):
            unused.fill(0)
        return
    home = new // block_size - ONE
    arrived = home == run
    arrived &= crossed
    np.putmask(kept, arrived, ONE)
    arrived &= bias == ZERO
    moved = (crossed ^ arrived).astype(INT)
    np.multiply(bias, moved, conv_bias)
    home *= moved
    flat, starts = table.numpy().reshape(-1), row_starts(*table.shape)
    entry = run + starts
    np.multiply(flat.take(entry), moved, conv_src)
    np.multiply(flat.take(entry + conv_bias), moved, ssm_src)
    np.multiply(flat.take(home + starts), moved, dst)
