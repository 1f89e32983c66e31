"""The specification of the other form of `plan_replay`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import ReplayPlan
from bateleur.mamba.spec import CacheLayout


def plan_replay(
    layout: CacheLayout,
    plan: ReplayPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
) -> None:
    """See `bateleur.mamba.planners.plan_replay`."""
    # Factors of 0 and 1 in place of masks: whatever a padded row holds is gone before it becomes an index.
    valid = query_lens.sign().long()
    n = computed.long() * valid
    torch.mul(base, valid, out=plan.ring_start)
    torch.sub(n, plan.ring_start, out=plan.ring_len)
    torch.mul(accepted, valid, out=plan.conv_offset).sub_(valid)
    has = plan.ring_start.sign()
    # Whatever this step accepts, a fold ends in the block of its first token, or on that block's last boundary.
    columns = torch.stack((plan.ring_start - has, n)).div_(layout.block_size, rounding_mode="trunc")
    checkpoint, written = table.t().gather(0, columns).long().unbind()
    torch.mul(checkpoint, has, out=plan.slot)
    plan.fold_slot.copy_(written)
