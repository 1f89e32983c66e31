"""Plans the state slots that a step under SLOTS (a slot for each draft) reads and writes. Legend as in `plans`."""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import SlotPlan, require
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_step(
    layout: CacheLayout,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None = None,
    out: SlotPlan | None = None,
    *,
    prev_col: Tensor | None = None,
) -> SlotPlan:
    """Plan the state slots of one step under SLOTS (a slot for the state after each draft), in any cache mode.

    Let `run_col` be the block-table column of the step's last token (0 in mode NONE). The step writes the state after
    its token i to column run_col + i, and the conv window with K (drafts) additional entries to column run_col. The
    next step reads the state from column prev_col + accepted - 1, and the window from column prev_col at offset
    accepted - 1, where `prev_col` is this step's `run_col`. A row without a previous step reads the column of its last
    computed token. A row with no computed tokens starts from zeros.

    A step may read and write different slots, so no state is copied before it, neither from a cached prefix nor to a
    new block.

    Args:
        layout: block-table layout of the group, with the policy SLOTS.
        table: (R, columns) integer block table of state slots, at least `layout.columns()` columns, 0 without a slot.
        computed: (R,) tokens before the step, without rejected tokens.
        query_lens: (R,) tokens of the step; 0 in padded rows.
        accepted: (R,) accepted tokens of the previous step, clamped to [1, 1 + K]; ignored in rows without tokens or
            without a state. None means 1 in all rows.
        out: plan to fill in place; by default a new one is allocated.
        prev_col: (R,) int64 `run_col` of the row's previous step, -1 if there was none; None means -1 in all rows.
            Ignored in mode NONE.

    Raises:
        ValueError: the layout has another policy, the table is too narrow, a row count differs, or, on CUDA, `out` is
            not contiguous.
    """
    rows, width = table.shape[0], 1 + layout.num_speculative_tokens
    plan = SlotPlan.allocate(layout, rows, table.device) if out is None else out
    if plan.ssm_write.shape != (rows, width):
        raise ValueError(f"out has shape {tuple(plan.ssm_write.shape)}; the step needs {(rows, width)}")
    of_rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "prev_col": prev_col}
    require(layout, StatePolicy.SLOTS, table, of_rows | {"out": plan.run_col})
    FORMS.on(table)(layout, plan, table, computed, query_lens, accepted, prev_col)
    return plan


def _in_torch(
    layout: CacheLayout,
    plan: SlotPlan,
    table: Tensor,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor | None,
    prev_col: Tensor | None,
) -> None:
    # Values of padded rows are multiplied by 0 before they are used as an index. `has` is 1 in rows with a state.
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
        if prev_col is not None:  # prev_col is never before the column of the last accepted token
            anchor = torch.maximum(anchor, prev_col).mul_(has)
    _fill(plan, table, anchor, run, has, tokens)


def _fill(plan: SlotPlan, table: Tensor, anchor: Tensor, run: Tensor, has: Tensor, tokens: Tensor) -> None:
    """Fill `plan` with state slots from `table`: columns from `anchor` on are read, columns from `run` on written."""
    columns = torch.stack((anchor, anchor + plan.conv_offset))
    conv_read, ssm_read = table.t().gather(0, columns).long().mul_(has).unbind()
    plan.conv_read.copy_(conv_read)
    plan.ssm_read.copy_(ssm_read)
    steps = torch.arange(plan.ssm_write.shape[1], device=table.device)
    write = table.gather(1, run[:, None] + steps).mul_(tokens[:, None] > steps)
    plan.ssm_write.copy_(write)
    plan.conv_write.copy_(write[:, 0])


FORMS = Implementations(_in_torch, triton="bateleur.mamba.planners.triton:plan_step")
