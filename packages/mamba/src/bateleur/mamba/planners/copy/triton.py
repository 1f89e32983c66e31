"""`plan_copy` in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, SlotPlan
from bateleur.mamba.planners.shared.triton import dense, load, outputs, slot, tile_options
from bateleur.mamba.spec import CacheLayout, MambaCacheMode


@triton.jit(do_not_specialize=["num_rows"])
def copy_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, drafts_ptr, accepted_ptr, run_ptr,
    conv_src_ptr, bias_ptr, ssm_src_ptr, dst_ptr, kept_ptr, prev_ptr,
    num_rows, table_row, table_column,
    SIZE: tl.constexpr, BOUNDARIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows); constants as for `step_plan_kernel`."""
    row_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned_R = row_R < num_rows
    tokens_R = load(lens_ptr, row_R, owned_R)
    live_R = tokens_R > 0
    drafts_R = load(drafts_ptr, row_R, live_R)
    extra_R = tl.minimum(tl.maximum(load(accepted_ptr, row_R, live_R), 1) - 1, drafts_R)
    kept_R, zero_R = extra_R + 1, tl.zeros([BLOCK], tl.int64)
    run_R, bias_R, conv_src_R, ssm_src_R, dst_R = zero_R, zero_R, zero_R, zero_R, zero_R
    if BOUNDARIES:
        run_R = load(run_ptr, row_R, owned_R)
        new_R = load(computed_ptr, row_R, live_R) + tokens_R - drafts_R + extra_R
        blocks_R = new_R // SIZE
        bias_R = extra_R - (new_R - blocks_R * SIZE)
        crossed_R = live_R & (bias_R >= 0)
        arrived_R = crossed_R & (blocks_R - 1 == run_R)
        kept_R = tl.where(arrived_R, 1, kept_R)
        moved_R = crossed_R & ((bias_R != 0) | (arrived_R == 0))
        bias_R = tl.where(moved_R, bias_R, 0)
        row_ptr_R = table_ptr + row_R.to(tl.int64) * table_row
        conv_src_R = slot(row_ptr_R, table_column, run_R, moved_R)
        ssm_src_R = slot(row_ptr_R, table_column, run_R + bias_R, moved_R)
        dst_R = slot(row_ptr_R, table_column, blocks_R - 1, moved_R)
    tl.store(kept_ptr + row_R, kept_R, mask=owned_R)
    tl.store(prev_ptr + row_R, run_R, mask=owned_R)
    tl.store(bias_ptr + row_R, bias_R, mask=owned_R)
    tl.store(conv_src_ptr + row_R, conv_src_R, mask=owned_R)
    tl.store(ssm_src_ptr + row_R, ssm_src_R, mask=owned_R)
    tl.store(dst_ptr + row_R, dst_R, mask=owned_R)


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
    rows, options = table.shape[0], tile_options()
    copy_plan_kernel[(triton.cdiv(rows, options["BLOCK"]),)](
        table, *dense(computed, query_lens, num_drafts, accepted, plan.run_col), *outputs(out), rows,
        *table.stride(), SIZE=layout.block_size, BOUNDARIES=layout.mode is not MambaCacheMode.NONE, **options,
    )  # fmt: skip
