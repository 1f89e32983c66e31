"""`plan_step` in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import SlotPlan
from bateleur.mamba.planners.shared.triton import dense, load, outputs, slot, tile_options
from bateleur.mamba.spec import CacheLayout, MambaCacheMode


@triton.jit(do_not_specialize=["num_rows"])
def step_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, accepted_ptr, prev_ptr,
    ssm_read_ptr, ssm_write_ptr, conv_read_ptr, offset_ptr, conv_write_ptr, run_ptr,
    num_rows, table_row, table_column,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BOUNDARIES: tl.constexpr, HAS_ACCEPTED: tl.constexpr,
    HAS_PREV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows). SIZE is tokens of a cache block; without BOUNDARIES, in mode NONE, it is not used."""
    row_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned_R = row_R < num_rows
    tokens_R = load(lens_ptr, row_R, owned_R)
    live_R = tokens_R > 0
    n_R = load(computed_ptr, row_R, live_R)
    has_R = n_R > 0
    offset_R = tl.zeros([BLOCK], tl.int64)
    if HAS_ACCEPTED:
        kept_R = tl.minimum(tl.maximum(load(accepted_ptr, row_R, has_R), 1), WIDTH)
        offset_R = tl.where(has_R, kept_R - 1, 0)
    anchor_R, run_R = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    if BOUNDARIES:
        anchor_R = tl.where(has_R, n_R - 1, 0) // SIZE
        run_R = tl.where(live_R, n_R + tokens_R - 1, 0) // SIZE
        if HAS_PREV:
            anchor_R = tl.maximum(anchor_R, load(prev_ptr, row_R, has_R))
    row_ptr_R = table_ptr + row_R.to(tl.int64) * table_row
    tl.store(run_ptr + row_R, run_R, mask=owned_R)
    tl.store(offset_ptr + row_R, offset_R, mask=owned_R)
    tl.store(conv_read_ptr + row_R, slot(row_ptr_R, table_column, anchor_R, has_R), mask=owned_R)
    tl.store(ssm_read_ptr + row_R, slot(row_ptr_R, table_column, anchor_R + offset_R, has_R), mask=owned_R)
    tl.store(conv_write_ptr + row_R, slot(row_ptr_R, table_column, run_R, live_R), mask=owned_R)
    write_ptr_R = ssm_write_ptr + row_R.to(tl.int64) * WIDTH
    for token in tl.static_range(WIDTH):
        slot_R = slot(row_ptr_R, table_column, run_R + token, tokens_R > token)
        tl.store(write_ptr_R + token, slot_R, mask=owned_R)


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
    rows, options = table.shape[0], tile_options()
    step_plan_kernel[(triton.cdiv(rows, options["BLOCK"]),)](
        table, *dense(computed, query_lens, accepted, prev_col), *outputs(plan), rows, *table.stride(),
        WIDTH=plan.ssm_write.shape[1], SIZE=layout.block_size, BOUNDARIES=layout.mode is not MambaCacheMode.NONE,
        HAS_ACCEPTED=accepted is not None, HAS_PREV=prev_col is not None, **options,
    )  # fmt: skip
