"""State policy SLOTS (a slot for each draft): plans the slots that a step reads and writes, and the copies after it.

Legend as in `plans`.
"""

import torch
from torch import Tensor

from bateleur.mamba.planners.plans import FORMS, CopyPlan, SlotPlan, require, slots_at
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata.dispatch import Implementations


def plan_step(
    layout: CacheLayout, table: Tensor, computed: Tensor, query_lens: Tensor, accepted: Tensor | None = None,
    out: SlotPlan | None = None, *, prev_col: Tensor | None = None,
) -> SlotPlan:  # fmt: skip
    """Plan the state slots of one step, state policy SLOTS (a slot for the state after each draft), in any cache mode.

    Let `run_col` be the block-table column of the step's last token (0 in mode NONE). The step writes the state after
    its token i to column run_col + i, and the conv window with K (drafts) additional entries to column run_col. The
    next step reads the state from column prev_col + accepted - 1, and the window from column prev_col at offset
    accepted - 1, where `prev_col` is this step's `run_col`. A row without a previous step reads the column of its last
    computed token. A row with no computed tokens starts from zeros.

    A step may read and write different slots, so no state is copied before it, neither from a cached prefix nor to a
    new block.

    Args:
        layout: block-table layout of the group, with the state policy SLOTS.
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
    plan = SlotPlan.allocate(layout, len(table), table.device) if out is None else out
    shape = (len(table), 1 + layout.num_speculative_tokens)
    if plan.ssm_write.shape != shape:
        raise ValueError(f"out has shape {tuple(plan.ssm_write.shape)}; the step needs {shape}")
    rows = {"computed": computed, "query_lens": query_lens, "accepted": accepted, "prev_col": prev_col}
    require(layout, StatePolicy.SLOTS, ("table", table), **rows, out=plan.run_col)
    FORMS["plan_step"].on(table)(layout, plan, table, computed, query_lens, accepted, prev_col)
    return plan


def _step(
    layout: CacheLayout, plan: SlotPlan, table: Tensor, computed: Tensor, query_lens: Tensor, accepted: Tensor | None,
    prev_col: Tensor | None,
) -> None:  # fmt: skip
    live, width = query_lens > 0, plan.ssm_write.shape[1]
    n = torch.where(live, computed, 0).long()
    has_state = n > 0
    read = run = offset = torch.zeros_like(n)
    if accepted is not None:
        offset = torch.where(has_state, accepted.clamp(1, width) - 1, 0)
    if layout.mode is not MambaCacheMode.NONE:
        read = (n - 1).clamp_min(0) // layout.block_size
        run = torch.where(live, n + query_lens - 1, 0) // layout.block_size
        if prev_col is not None:  # never before the column of the last accepted token
            read = torch.maximum(read, prev_col)
    token = torch.arange(width, device=table.device)
    write = torch.where(token < query_lens[:, None], table.gather(1, run[:, None] + token), 0)
    plan.fill(
        ssm_read=slots_at(table, read + offset, has_state), ssm_write=write,
        conv_read=slots_at(table, read, has_state), conv_offset=offset, conv_write=write[:, 0], run_col=run,
    )  # fmt: skip


def plan_copy(
    layout: CacheLayout, table: Tensor, computed: Tensor, query_lens: Tensor, num_drafts: Tensor, accepted: Tensor,
    plan: SlotPlan, out: CopyPlan | None = None,
) -> CopyPlan:  # fmt: skip
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
        accepted: (R,) accepted tokens of the row, counting its first token, which is no draft; clamped to
            [1, 1 + num_drafts], so values of prefills and padded rows are ignored.
        plan: result of `plan_step` for this step.

    Raises:
        ValueError: as in `plan_step`.
    """
    out = CopyPlan.allocate(len(table), table.device) if out is None else out
    rows = {"computed": computed, "query_lens": query_lens, "num_drafts": num_drafts, "accepted": accepted}
    require(layout, StatePolicy.SLOTS, ("table", table), **rows, plan=plan.run_col, out=out.accepted)
    FORMS["plan_copy"].on(table)(layout, out, table, computed, query_lens, num_drafts, accepted, plan)
    return out


def _copy(
    layout: CacheLayout, out: CopyPlan, table: Tensor, computed: Tensor, query_lens: Tensor, num_drafts: Tensor,
    accepted: Tensor, plan: SlotPlan,
) -> None:  # fmt: skip
    live, run, none = query_lens > 0, plan.run_col, torch.zeros_like(out.dst)
    extra = torch.where(live, torch.minimum(accepted.clamp_min(1) - 1, num_drafts), 0)
    if layout.mode is MambaCacheMode.NONE:  # no boundaries
        out.fill(conv_src=none, conv_bias=none, ssm_src=none, dst=none, accepted=extra + 1, prev_col=none)
        return
    n = computed + query_lens - num_drafts + extra
    column, bias = n // layout.block_size - 1, extra - n % layout.block_size
    # `bias` is the index, among the states of this step, of the state at the boundary.
    crossed = live & (bias >= 0)
    in_place = crossed & (column == run)
    moved = crossed & ((bias != 0) | ~in_place)
    bias = torch.where(moved, bias, 0)
    out.fill(
        conv_src=slots_at(table, run, moved), conv_bias=bias, ssm_src=slots_at(table, run + bias, moved),
        dst=slots_at(table, column, moved), accepted=torch.where(in_place, 1, extra + 1), prev_col=run,
    )  # fmt: skip


FORMS["plan_step"] = Implementations(_step, triton="bateleur.mamba.planners.triton:plan_step")
FORMS["plan_copy"] = Implementations(_copy, triton="bateleur.mamba.planners.triton:plan_copy")
