"""The specification of the other form of `plan_fold`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan
from bateleur.mamba.spec import CacheLayout


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
    """See `bateleur.mamba.planners.plan_fold`."""
    # 0 in padded rows, and so everything is.
    torch.minimum(accepted.clamp_min(1), query_lens, out=out.accepted)
    ring = plan.ring_len + out.accepted
    # Entries to keep: those behind the last boundary, if the ring reaches back beyond it.
    keep = torch.minimum((computed + out.accepted).remainder_(layout.block_size), ring)
    full = keep > layout.ring_capacity - 1 - layout.num_speculative_tokens
    if flush is not None:
        full |= flush & (keep == ring)
    keep.masked_fill_(full, 0)
    torch.sub(ring, keep, out=out.count)
    if scanned is not None:
        out.accepted.masked_fill_(scanned, 1)
        out.count.masked_fill_(scanned, 0)
    torch.add(plan.ring_start, out.count, out=out.base)
    if scanned is not None:
        torch.where(scanned, computed + query_lens, out.base, out=out.base)
    folds = out.count.sign()
    torch.mul(plan.fold_slot, folds, out=out.dst)
    torch.sub(out.accepted, keep, out=out.page_offset).sub_(1).mul_(folds)
