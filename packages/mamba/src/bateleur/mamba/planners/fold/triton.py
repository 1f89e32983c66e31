"""`plan_fold` in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import FoldPlan, ReplayPlan
from bateleur.mamba.planners.shared.triton import dense, load, outputs, tile_options
from bateleur.mamba.spec import CacheLayout


@triton.jit(do_not_specialize=["num_rows"])
def fold_plan_kernel(
    computed_ptr, lens_ptr, accepted_ptr, flush_ptr, scanned_ptr, fold_slot_ptr, start_ptr, length_ptr,
    dst_ptr, count_ptr, offset_ptr, base_ptr, kept_ptr,
    num_rows,
    SIZE: tl.constexpr, MOST_KEPT: tl.constexpr, HAS_FLUSH: tl.constexpr, HAS_SCANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows). MOST_KEPT is entries that a ring may hold when the next step begins."""
    row_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned_R = row_R < num_rows
    tokens_R = load(lens_ptr, row_R, owned_R)
    live_R = tokens_R > 0
    n_R = load(computed_ptr, row_R, owned_R)
    kept_R = tl.minimum(tl.maximum(load(accepted_ptr, row_R, live_R), 1), tokens_R)
    start_R = load(start_ptr, row_R, owned_R)
    ring_R = load(length_ptr, row_R, owned_R) + kept_R
    keep_R = tl.minimum(tl.where(live_R, n_R + kept_R, 0) % SIZE, ring_R)
    full_R = keep_R > MOST_KEPT
    if HAS_FLUSH:
        full_R = full_R | ((load(flush_ptr, row_R, owned_R) != 0) & (keep_R == ring_R))
    keep_R = tl.where(full_R, 0, keep_R)
    count_R = ring_R - keep_R
    base_R = start_R + count_R
    if HAS_SCANNED:
        scanned_R = load(scanned_ptr, row_R, owned_R) != 0
        kept_R, count_R = tl.where(scanned_R, 1, kept_R), tl.where(scanned_R, 0, count_R)
        base_R = tl.where(scanned_R, n_R + tokens_R, base_R)
    folds_R = count_R > 0
    tl.store(dst_ptr + row_R, load(fold_slot_ptr, row_R, owned_R & folds_R), mask=owned_R)
    tl.store(count_ptr + row_R, count_R, mask=owned_R)
    tl.store(offset_ptr + row_R, tl.where(folds_R, kept_R - keep_R - 1, 0), mask=owned_R)
    tl.store(base_ptr + row_R, base_R, mask=owned_R)
    tl.store(kept_ptr + row_R, kept_R, mask=owned_R)


def plan_fold(
    layout: CacheLayout,
    out: FoldPlan,
    plan: ReplayPlan,
    computed: Tensor,
    query_lens: Tensor,
    accepted: Tensor,
    flush: Tensor | None,
    scanned: Tensor | None,
) -> None:
    """See `bateleur.mamba.planners.plan_fold`."""
    rows, options = query_lens.shape[0], tile_options()
    fold_plan_kernel[(triton.cdiv(rows, options["BLOCK"]),)](
        *dense(computed, query_lens, accepted, flush, scanned, plan.fold_slot, plan.ring_start, plan.ring_len),
        *outputs(out), rows, SIZE=layout.block_size,
        MOST_KEPT=layout.ring_capacity - 1 - layout.num_speculative_tokens, HAS_FLUSH=flush is not None,
        HAS_SCANNED=scanned is not None, **options,
    )  # fmt: skip
