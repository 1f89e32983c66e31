"""`plan_replay` in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import ReplayPlan
from bateleur.mamba.planners.shared.triton import dense, load, outputs, slot, tile_options
from bateleur.mamba.spec import CacheLayout


@triton.jit(do_not_specialize=["num_rows"])
def replay_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, base_ptr, accepted_ptr,
    slot_ptr, fold_slot_ptr, start_ptr, length_ptr, offset_ptr,
    num_rows, table_row, table_column,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows)."""
    row_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned_R = row_R < num_rows
    live_R = load(lens_ptr, row_R, owned_R) > 0
    n_R, start_R = load(computed_ptr, row_R, live_R), load(base_ptr, row_R, live_R)
    has_R = start_R > 0
    row_ptr_R = table_ptr + row_R.to(tl.int64) * table_row
    slot_R = slot(row_ptr_R, table_column, tl.where(has_R, start_R - 1, 0) // SIZE, has_R)
    offset_R = tl.where(live_R, load(accepted_ptr, row_R, live_R) - 1, 0)
    tl.store(slot_ptr + row_R, slot_R, mask=owned_R)
    tl.store(fold_slot_ptr + row_R, slot(row_ptr_R, table_column, n_R // SIZE, owned_R), mask=owned_R)
    tl.store(start_ptr + row_R, start_R, mask=owned_R)
    tl.store(length_ptr + row_R, n_R - start_R, mask=owned_R)
    tl.store(offset_ptr + row_R, offset_R, mask=owned_R)


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
    rows, options = table.shape[0], tile_options()
    replay_plan_kernel[(triton.cdiv(rows, options["BLOCK"]),)](
        table, *dense(computed, query_lens, base, accepted), *outputs(plan), rows, *table.stride(),
        SIZE=layout.block_size, **options,
    )  # fmt: skip
