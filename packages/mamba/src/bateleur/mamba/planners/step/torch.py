"""The specification of the other forms of `plan_step`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import SlotPlan
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
    # Factors of 0 and 1 in place of masks: `has` a state to read, and hence also tokens. Whatever a padded row holds is
    # gone with the first product, so no index below leaves the table.
    tokens = query_lens.long()
    valid = tokens.sign()
    n = computed.long() * valid
    has = n.sign()
    if accepted is None:
        plan.conv_offset.zero_()
    else:
        torch.mul(accepted.clamp(1, plan.ssm_write.shape[1]).sub_(1), has, out=plan.conv_offset)
    anchor = run = torch.zeros_like(n)
    if layout.mode is MambaCacheMode.NONE:
        plan.run_col.zero_()
    else:
        last = torch.stack((n - has, n + tokens - valid))
        anchor, run = last.div_(layout.block_size, rounding_mode="trunc").unbind()
        plan.run_col.copy_(run)
        if prev_col is not None:  # never before the column of the last accepted token
            anchor = torch.maximum(anchor, prev_col).mul_(has)
    _fill(plan, table, anchor, run, has, tokens)


def _fill(plan: SlotPlan, table: Tensor, anchor: Tensor, run: Tensor, has: Tensor, tokens: Tensor) -> None:
    """Slots of the columns to read from `anchor` on, and to write from `run` on."""
    columns = torch.stack((anchor, anchor + plan.conv_offset))
    conv_read, ssm_read = table.t().gather(0, columns).long().mul_(has).unbind()
    plan.conv_read.copy_(conv_read)
    plan.ssm_read.copy_(ssm_read)
    steps = torch.arange(plan.ssm_write.shape[1], device=table.device)
    write = table.gather(1, run[:, None] + steps).mul_(tokens[:, None] > steps)
    plan.ssm_write.copy_(write)
    plan.conv_write.copy_(write[:, 0])
