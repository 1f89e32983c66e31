"""Which slots a step reads and writes under SLOTS. Legend as in `plans`."""

import torch
from torch import Tensor

from bateleur.mamba.planners.checks import require
from bateleur.mamba.planners.plans import SlotPlan
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
    eager: bool = False,
) -> SlotPlan:
    """The slots of one step under SLOTS, in any cache mode.

    The step writes from column `run_col` on, that of its last token: the state after token i to column run_col + i,
    and the conv window, widened to hold every token's, to column run_col. So the next one reads both from the column
    that this one wrote, its `prev_col`, and not from the block of the last accepted token, which may come before it:
    the state from column prev_col + accepted - 1, the window from column prev_col at offset accepted - 1. A row
    without a previous step reads the column of its last token; a row with nothing computed starts from zeros. In mode
    NONE `run_col` is 0.

    Reads and writes being separate, nothing is copied before the step: neither out of a shared prefix nor into a new
    column.

    Args:
        layout: of the group the table belongs to.
        table: (R, columns) integer block table; at least `layout.columns()` columns, 0 where there is no slot.
        computed: (R,) tokens before the step, accepted ones only.
        query_lens: (R,) tokens of the step; 0 in padded rows.
        accepted: (R,) in rows with tokens and a state, ignored in others, and held to [1, 1 + K]; None means 1 in all.
        out: buffers to fill instead of allocating; their addresses are kept.
        prev_col: (R,) int64 `run_col` of the row's previous step, -1 where there is none; None means -1 in all. Ignored
            in mode NONE.
        eager: nothing is being captured, so a CPU may plan in numpy, to the same result. The default keeps to torch's
            operators, which a recorded graph has to see. On CUDA the planner is one Triton kernel either way.

    Raises:
        ValueError: the layout is FOLD's, the table is too narrow, a row count differs, a CPU that plans in numpy finds
            a row beyond `max_model_len`, or, on CUDA, `out` is strided.
    """
    rows, width = table.shape[0], 1 + layout.num_speculative_tokens
    plan = SlotPlan.allocate(layout, rows, table.device) if out is None else out
    if plan.ssm_write.shape != (rows, width):
        raise ValueError(f"out has shape {tuple(plan.ssm_write.shape)}; the step needs {(rows, width)}")
    of_rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "prev_col": prev_col}
    require(layout, StatePolicy.SLOTS, table, of_rows | {"out": plan.run_col})
    fill = FORMS.on(table, eager=eager)
    fill(layout, plan, table, computed, query_lens, accepted, prev_col)
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


FORMS = Implementations(
    _in_torch,
    triton="bateleur.mamba.planners.triton:plan_step",
    numpy="bateleur.mamba.planners.host:plan_step",
)
