"""Plans the saved states and rings of later inputs that a step under FOLD reads. Legend as in `fold`."""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import ReplayPlan, require
from bateleur.mamba.spec import CacheLayout, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_replay(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
    out: ReplayPlan | None = None,
) -> ReplayPlan:
    """Plan the saved state, ring of later inputs and conv window that each request of a step under FOLD starts from.

    Args:
        layout, table, computed, query_lens, out: as in `plan_step`.
        base: (R,) int64 tokens in the saved state, at most `computed`: the result of the previous `plan_fold`, or the
            tokens of the prefix-cache hit of a new request.
        accepted: (R,) int64 accepted tokens of the row's previous step, in [1, 1 + drafts], from `plan_fold`; 1 at
            first.

    Raises:
        ValueError: the layout has another policy, the table is too narrow, a row count differs, or, on CUDA, `out` is
            not contiguous.
    """
    plan = ReplayPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "base": base, "accepted": accepted}
    require(layout, StatePolicy.FOLD, table, rows | {"out": plan.slot})
    FORMS.on(table)(layout, plan, table, computed, query_lens, base, accepted)
    return plan


def _in_torch(
    layout: CacheLayout,
    plan: ReplayPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    base: Tensor,
    accepted: Tensor,
) -> None:
    # Values of padded rows are multiplied by 0 before they are used as an index.
    valid = query_lens.sign().long()
    n = computed.long() * valid
    torch.mul(base, valid, out=plan.ring_start)
    torch.sub(n, plan.ring_start, out=plan.ring_len)
    torch.mul(accepted, valid, out=plan.conv_offset).sub_(valid)
    has = plan.ring_start.sign()
    # A fold after this step ends in the block of its first token, for any number of accepted tokens.
    columns = torch.stack((plan.ring_start - has, n)).div_(layout.block_size, rounding_mode="trunc")
    checkpoint, written = table.t().gather(0, columns).long().unbind()
    torch.mul(checkpoint, has, out=plan.slot)
    plan.fold_slot.copy_(written)


FORMS = Implementations(_in_torch, triton="bateleur.mamba.planners.triton:plan_replay")
