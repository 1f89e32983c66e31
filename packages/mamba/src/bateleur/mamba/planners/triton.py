"""Triton forms of the planners, one kernel each. For a row without tokens, only its length is loaded.

Legend: R rows (requests) of a tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import Plan
from bateleur.mamba.spec import MambaCacheMode
from bateleur.metadata.dispatch import cdiv


@triton.jit
def load(ptr, row_R, real_R):
    """Load one value per request from ``ptr``: (R,) int64, 0 where ``real_R`` is False."""
    return tl.load(ptr + row_R, mask=real_R, other=0).to(tl.int64)


@triton.jit
def slot(row_ptr_R, table_column, column_R, real_R):
    """Load state slots (R,) int64 from the block table at columns `column_R`, 0 where `real_R` is False.

    `row_ptr_R`: addresses of the requests' block-table rows. `table_column`: stride of columns.
    """
    return tl.load(row_ptr_R + column_R * table_column, mask=real_R, other=0).to(tl.int64)


def launch(kernel, num_rows, *args, **constants):
    """Launch a kernel of this module, with one row of the batch per thread."""
    block = 128
    kernel[(cdiv(num_rows, block),)](*args, **constants, BLOCK=block, num_warps=4, enable_fp_fusion=True)


def dense(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Return the tensors, made contiguous. `first` stands in for a None, which the kernel does not read."""
    return [first.contiguous(), *(first if each is None else each.contiguous() for each in others)]


def outputs(plan: Plan) -> list[Tensor]:
    """Return the tensors of a plan. Raises ValueError if one is not contiguous."""
    for name, tensor in plan.tensors().items():
        if not tensor.is_contiguous():
            raise ValueError(f"out.{name} has strides {tensor.stride()}; a kernel needs it contiguous")
    return [*plan.tensors().values()]


# `RequestStates.gather` aligns `prev_ptr` to 8 bytes only, if the number of rows is odd.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["prev_ptr"])
def step_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, accepted_ptr, prev_ptr,
    ssm_read_ptr, ssm_write_ptr, conv_read_ptr, offset_ptr, conv_write_ptr, run_ptr,
    num_rows, table_row, table_column,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BOUNDARIES: tl.constexpr, HAS_ACCEPTED: tl.constexpr,
    HAS_PREV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the state slots that a step reads and writes, see `slots.plan_step`; state policy SLOTS (slot per draft).

    Reads table, computed, lens, accepted and prev; writes the fields of a `SlotPlan`. Grid (tiles of rows).
    Occupancy on sm_90: at least 16 blocks per SM.
    WIDTH: maximum tokens of a row. SIZE: tokens of a block. BOUNDARIES: whether blocks have states; false in cache mode
    NONE, which ignores SIZE.
    """
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


def plan_step(layout, plan, table, computed, query_lens, accepted, prev_col):
    """Triton form of `planners.plan_step`, same arguments; writes the result to `plan`."""
    inputs, rows = dense(computed, query_lens, accepted, prev_col), len(table)
    launch(
        step_plan_kernel, rows, table, *inputs, *outputs(plan), rows, *table.stride(),
        WIDTH=plan.ssm_write.shape[1], SIZE=layout.block_size, BOUNDARIES=layout.mode is not MambaCacheMode.NONE,
        HAS_ACCEPTED=accepted is not None, HAS_PREV=prev_col is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def copy_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, drafts_ptr, accepted_ptr, run_ptr,
    conv_src_ptr, bias_ptr, ssm_src_ptr, dst_ptr, kept_ptr, prev_ptr,
    num_rows, table_row, table_column,
    SIZE: tl.constexpr, BOUNDARIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute which states to copy so that those at block boundaries stay, see `slots.plan_copy`; policy SLOTS.

    Reads table, computed, lens, drafts, accepted and run (of the `SlotPlan`); writes the fields of a `CopyPlan` (kept
    is its `accepted`). Grid (tiles of rows). Occupancy on sm_90: at least 16 blocks per SM. Constants as for
    `step_plan_kernel`.
    """
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


def plan_copy(layout, out, table, computed, query_lens, num_drafts, accepted, plan):
    """Triton form of `planners.plan_copy`, same arguments; writes the result to `out`."""
    inputs, rows = dense(computed, query_lens, num_drafts, accepted, plan.run_col), len(table)
    launch(
        copy_plan_kernel, rows, table, *inputs, *outputs(out), rows, *table.stride(), SIZE=layout.block_size,
        BOUNDARIES=layout.mode is not MambaCacheMode.NONE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def replay_plan_kernel(
    table_ptr, computed_ptr, lens_ptr, base_ptr, accepted_ptr,
    slot_ptr, fold_slot_ptr, start_ptr, length_ptr, offset_ptr,
    num_rows, table_row, table_column,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the saved state, ring and conv window that decodes start from, state policy FOLD. Grid (tiles of rows).

    Reads table, computed, lens, base and accepted; writes the fields of a `ReplayPlan`, see `fold.plan_replay`.
    Occupancy on sm_90: at least 16 blocks per SM.
    """
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


def plan_replay(layout, plan, table, computed, query_lens, base, accepted):
    """Triton form of `planners.plan_replay`, same arguments; writes the result to `plan`."""
    inputs, rows = dense(computed, query_lens, base, accepted), len(table)
    launch(
        replay_plan_kernel, rows, table, *inputs, *outputs(plan), rows, *table.stride(), SIZE=layout.block_size,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def fold_plan_kernel(
    computed_ptr, lens_ptr, accepted_ptr, flush_ptr, scanned_ptr, fold_slot_ptr, start_ptr, length_ptr,
    dst_ptr, count_ptr, offset_ptr, base_ptr, kept_ptr,
    num_rows,
    SIZE: tl.constexpr, MOST_KEPT: tl.constexpr, HAS_FLUSH: tl.constexpr, HAS_SCANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute which entries of the rings of later inputs are added to saved states. Grid (tiles of rows).

    Reads computed, lens, accepted, flush, scanned, and fold_slot, start and length of the `ReplayPlan`. Writes the
    fields of a `FoldPlan` (kept is its `accepted`), see `fold.plan_fold`.
    Occupancy on sm_90: at least 16 blocks per SM. MOST_KEPT: maximum number of ring entries before a step.
    """
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


def plan_fold(layout, out, plan, computed, query_lens, accepted, flush, scanned):
    """Triton form of `planners.plan_fold`, same arguments; writes the result to `out`."""
    inputs, rows = dense(computed, query_lens, accepted, flush, scanned), len(query_lens)
    launch(
        fold_plan_kernel, rows, *inputs, *dense(plan.fold_slot, plan.ring_start, plan.ring_len), *outputs(out), rows,
        SIZE=layout.block_size, MOST_KEPT=layout.ring_capacity - 1 - layout.num_speculative_tokens,
        HAS_FLUSH=flush is not None, HAS_SCANNED=scanned is not None,
    )  # fmt: skip
