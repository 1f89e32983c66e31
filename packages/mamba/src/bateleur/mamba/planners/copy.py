"""Plans copies of states to block boundaries after a step under SLOTS (a slot per draft). Legend as in `plans`."""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, SlotPlan, require
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_copy(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    plan: SlotPlan,
    out: CopyPlan | None = None,
) -> CopyPlan:
    """Plan the copies after a step planned by `plan_step`, once the accepted tokens are known.

    A row (request) with drafts wrote the state after its token i to block-table column `plan.run_col` + i. If its
    accepted tokens pass a block boundary, the state at the boundary is copied to the boundary's own column, and may
    then be added to the prefix cache. The conv window at the boundary starts `conv_bias` entries into the window of
    column run_col. If the boundary's column is run_col, the step ends at the boundary. The next step then reads column
    run_col, so its `accepted` becomes 1.

    Args:
        layout, table, computed, query_lens, out: as in `plan_step`.
        num_drafts: (R,) tokens of the row after its first, if the row wrote a state after each; 0 for a prefill, which
            wrote only its last state. A prompt's last tokens may run like drafts that are all accepted.
        accepted: (R,) accepted tokens of the row, the first one included; clamped to [1, 1 + num_drafts], so values of
            prefills and padded rows are ignored.
        plan: result of `plan_step` for this step.

    Raises:
        ValueError: as in `plan_step`.
    """
    out = CopyPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "num_drafts": num_drafts, "accepted": accepted}
    rows |= {"plan": plan.run_col, "out": out.accepted}
    require(layout, StatePolicy.SLOTS, table, rows)
    FORMS.on(table)(layout, out, table, computed, query_lens, num_drafts, accepted, plan)
    return out


def _in_torch(
    layout: CacheLayout,
    out: CopyPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    plan: SlotPlan,
) -> None:
    has_tokens = query_lens > 0
    extra = torch.minimum(accepted.clamp_min(1).sub_(1), num_drafts.long()).mul_(has_tokens)
    torch.add(extra, 1, out=out.accepted)
    if layout.mode is MambaCacheMode.NONE:  # no boundaries, and run_col is always 0
        for unused in (out.prev_col, out.conv_src, out.conv_bias, out.ssm_src, out.dst):
            unused.zero_()
        return
    run = out.prev_col.copy_(plan.run_col)
    new = (computed + query_lens - num_drafts).long().add_(extra)
    rest = new % layout.block_size  # tokens after the last boundary
    bias = extra - rest  # index, among the states of this step, of the state at the boundary
    crossed = bias.ge(0).logical_and_(has_tokens)
    column = new.sub_(rest).div_(layout.block_size, rounding_mode="trunc").sub_(1).mul_(crossed)
    in_place = column.eq(run).logical_and_(crossed)
    out.accepted.masked_fill_(in_place, 1)
    moved = crossed.logical_and_(bias.ne(0).logical_or_(~in_place))  # a state in its own column is not copied
    torch.mul(bias, moved, out=out.conv_bias)
    columns = torch.stack((run, run + out.conv_bias, column))
    slots = table.t().gather(0, columns).long().mul_(moved).unbind()
    for field, slot in zip((out.conv_src, out.ssm_src, out.dst), slots, strict=True):
        field.copy_(slot)


FORMS = Implementations(_in_torch, triton="bateleur.mamba.planners.triton:plan_copy")
