"""What follows acceptance under SLOTS: which states to copy to the boundaries they belong to. Legend as in `plans`."""

import torch
from torch import Tensor

from bateleur.mamba.planners.checks import require
from bateleur.mamba.planners.plans import CopyPlan, SlotPlan
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
    *,
    eager: bool = False,
) -> CopyPlan:
    """The copies after a step planned by `plan_step`, once the accepted tokens are known.

    A row with drafts left the state after its token i in column run_col + i. If a block boundary lies among its
    accepted tokens, the state there (and the conv window, which is `conv_bias` entries into the window of column
    run_col) is copied to the boundary's own column: only then may that column be published. Where that is run_col
    itself, the step ends on the boundary, and the next one finds its state there, as if one token had been accepted.

    Args:
        layout, table, computed, query_lens, out, eager: as in `plan_step`.
        num_drafts: (R,) tokens of the row after its first, if each left a state; 0 for a prompt's step, which left its
            last alone. A prompt's end that was padded to a step with drafts counts its other tokens here, and they are
            accepted.
        accepted: (R,) tokens of the row that survive, the first one included; held to [1, 1 + num_drafts], so whatever
            it is in prompts and padded rows does not matter.
        plan: of this step.

    Raises:
        ValueError: as in `plan_step`.
    """
    out = CopyPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "num_drafts": num_drafts, "accepted": accepted}
    rows |= {"plan": plan.run_col, "out": out.accepted}
    require(layout, StatePolicy.SLOTS, table, rows)
    fill = FORMS.on(table, eager=eager)
    fill(layout, out, table, computed, query_lens, num_drafts, accepted, plan)
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


FORMS = Implementations(
    _in_torch,
    triton="bateleur.mamba.planners.triton:plan_copy",
    numpy="bateleur.mamba.planners.host:plan_copy",
)
