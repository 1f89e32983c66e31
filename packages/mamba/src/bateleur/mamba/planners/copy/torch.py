"""The specification of the other forms of `plan_copy`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, SlotPlan
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
    has_tokens = query_lens > 0
    extra = torch.minimum(accepted.clamp_min(1).sub_(1), num_drafts.long()).mul_(has_tokens)
    torch.add(extra, 1, out=out.accepted)
    if layout.mode is MambaCacheMode.NONE:  # no boundary ever, and always column 0
        for unused in (out.prev_col, out.conv_src, out.conv_bias, out.ssm_src, out.dst):
            unused.zero_()
        return
    run = out.prev_col.copy_(plan.run_col)
    new = (computed + query_lens - num_drafts).long().add_(extra)
    behind = new % layout.block_size  # tokens behind the last boundary
    bias = extra - behind  # the boundary's token, counted from the first one that left a state
    crossed = bias.ge(0).logical_and_(has_tokens)
    home = new.sub_(behind).div_(layout.block_size, rounding_mode="trunc").sub_(1).mul_(crossed)
    arrived = home.eq(run).logical_and_(crossed)
    out.accepted.masked_fill_(arrived, 1)
    moved = crossed.logical_and_(bias.ne(0).logical_or_(~arrived))  # one that is in its place is not copied
    torch.mul(bias, moved, out=out.conv_bias)
    columns = torch.stack((run, run + out.conv_bias, home))
    slots = table.t().gather(0, columns).long().mul_(moved).unbind()
    for field, slot in zip((out.conv_src, out.ssm_src, out.dst), slots, strict=True):
        field.copy_(slot)
