"""Triton kernels of device-side staging. The functions of `bateleur.metadata._device_fields` are their specification.

Shapes: N rows (requests), T tokens, C cells or columns of a tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from bateleur.metadata._device_fields import DeviceFields, DeviceStep
from bateleur.metadata.dispatch import cdiv

_TILE = 256
# The kernels have no floats. Triton 3.9 warns if enable_fp_fusion is not given.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "max_reqs", "max_tokens", "first_id", "table_row"])
def device_fields_kernel(
    computed_ptr, new_starts_ptr, new_ids_ptr, table_ptr,
    ids_ptr, positions_ptr, starts_ptr, seq_lens_ptr, num_computed_ptr, slots_ptr,
    num_reqs, num_tokens, max_reqs, max_tokens, first_id, table_row,
    FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FILL: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute positions, lengths and slot mapping of a batch, and pad them. Grid (tiles of requests or tokens, the
    larger number).

    Occupancy on sm_90: at least 16 blocks per SM. Reads the first four pointers: computed tokens, query starts and
    token ids of the step, and a block table. Writes the other six, from ``ids_ptr`` on: fields of the batch.
    num_reqs, num_tokens: real sizes. max_reqs, max_tokens: sizes of the buffers. table_row: stride. FIELDS: write all
    fields, else slots only. BLOCK_SIZE: 0 if there are no slots. FILL: ``seq_lens`` of padded rows. SEARCH: steps of
    the binary search for the row of a token. new_ids_ptr: ids of tokens from ``first_id`` on.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FIELDS:
        real_N = index < num_reqs
        start_N = tl.load(new_starts_ptr + index, mask=real_N, other=num_tokens)
        end_N = tl.load(new_starts_ptr + index + 1, mask=real_N, other=num_tokens)
        computed_N = tl.load(computed_ptr + index, mask=real_N, other=0).to(tl.int32)
        row_N = index < max_reqs
        tl.store(num_computed_ptr + index, computed_N, mask=row_N)
        tl.store(seq_lens_ptr + index, tl.where(real_N, computed_N + end_N - start_N, FILL), mask=row_N)
        tl.store(starts_ptr + index, start_N, mask=index <= max_reqs)

    # The row of a token is the number of rows that end at or before it.
    low_T, high_T = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_reqs
    for _ in tl.static_range(SEARCH):
        open_T = low_T < high_T
        middle_T = (low_T + high_T) // 2
        ended_T = tl.load(new_starts_ptr + middle_T + 1, mask=open_T, other=0) <= index
        low_T = tl.where(open_T & ended_T, middle_T + 1, low_T)
        high_T = tl.where(open_T & (ended_T == 0), middle_T, high_T)
    owned_T, token_T = index < num_tokens, index < max_tokens
    start_T = tl.load(new_starts_ptr + low_T, mask=owned_T, other=0)
    computed_T = tl.load(computed_ptr + low_T, mask=owned_T, other=0).to(tl.int32)
    position_T = tl.where(owned_T, computed_T + index - start_T, 0)
    if FIELDS:
        tl.store(positions_ptr + index, position_T.to(tl.int64), mask=token_T)
        sent_T = owned_T & (index >= first_id)
        id_T = tl.load(new_ids_ptr + index - first_id, mask=sent_T, other=0)
        tl.store(ids_ptr + index, id_T, mask=token_T & (index >= first_id))
    if BLOCK_SIZE > 0:
        column_T = tl.minimum(position_T // BLOCK_SIZE, table_row - 1)
        cell_T = low_T.to(tl.int64) * table_row + column_T
        block_T = tl.load(table_ptr + cell_T, mask=owned_T, other=0).to(tl.int64)
        slot_T = tl.where(block_T > 0, block_T * BLOCK_SIZE + position_T % BLOCK_SIZE, -1)
        tl.store(slots_ptr + index, slot_T, mask=token_T)


@triton.jit(do_not_specialize=["table_row", "width"])
def gather_block_tables_kernel(
    batch_ptr, request_tables_ptr, rows_ptr, source_ptr, table_row, width, BLOCK: tl.constexpr
):
    """Copy block-table rows from the table of all requests to that of the batch. Grid (batch rows, tiles of columns).

    Occupancy on sm_90: at least 16 blocks per SM. source_ptr: row of ``request_tables_ptr`` to copy, or ``-1 - row`` to
    zero both rows; rows_ptr receives it. table_row, width: columns of the tables, and columns to copy.
    """
    place = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + place)
    row = tl.where(source < 0, -1 - source, source).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = column_C < width
    kept_C = column_C < tl.where(source >= 0, width, 0)
    id_C = tl.load(request_tables_ptr + row * table_row + column_C, mask=kept_C, other=0)
    tl.store(batch_ptr + place * table_row + column_C, id_C, mask=real_C)
    tl.store(request_tables_ptr + row * table_row + column_C, id_C, mask=column_C < tl.where(source < 0, width, 0))
    if tl.program_id(1) == 0:
        tl.store(rows_ptr + place, row.to(tl.int32))


@triton.jit(do_not_specialize=["table_row", "num_cells"])
def write_block_ids_kernel(
    batch_ptr, request_tables_ptr, rows_ptr, cells_ptr, new_ptr, table_row, num_cells, BLOCK: tl.constexpr
):
    """Write new block ids to the block tables of the batch and of all requests. Grid (tiles of new ids).
    Occupancy on sm_90: at least 16 blocks per SM. new_ptr: ids. cells_ptr: batch row * table_row + column of each id.
    rows_ptr: row of ``request_tables_ptr`` for each batch row. table_row: columns of the tables.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real_C = index < num_cells
    cell_C = tl.load(cells_ptr + index, mask=real_C, other=0)
    id_C = tl.load(new_ptr + index, mask=real_C, other=0)
    place_C = cell_C // table_row
    row_C = tl.load(rows_ptr + place_C, mask=real_C, other=0).to(tl.int64)
    tl.store(batch_ptr + cell_C, id_C, mask=real_C)
    tl.store(request_tables_ptr + row_C * table_row + cell_C - place_C * table_row, id_C, mask=real_C)


def expand(fields: DeviceFields, step: DeviceStep) -> None:
    """Write device fields as `_device_fields.expand`, by one launch and one more for each further group with slots."""
    x, num_tokens = fields, step.num_tokens
    max_reqs, max_tokens = x.seq_lens.shape[0], x.positions.shape[0]
    sizes = step.num_reqs, num_tokens, max_reqs, max_tokens, num_tokens - step.token_ids.shape[0]
    for index, (slots, table, block_size) in enumerate(x.slots or ((x.positions, x.query_start_loc, 0),)):
        device_fields_kernel[(cdiv(max(max_reqs + 1, max_tokens), _TILE),)](
            step.num_computed_tokens, step.query_start_loc, step.token_ids, table,
            x.input_ids, x.positions, x.query_start_loc, x.seq_lens, x.num_computed_tokens, slots,
            *sizes, table.shape[-1], FIELDS=index == 0, BLOCK_SIZE=block_size,
            FILL=x.seq_len_fill, SEARCH=max_reqs.bit_length(), BLOCK=_TILE, **_OPTIONS,
        )  # fmt: skip


def gather_block_tables(batch: Tensor, request_tables: Tensor, rows: Tensor, source: Tensor, width: int) -> None:
    """Copy rows ``source`` (-1 - row: clear) of all requests' block tables to the batch, and note them in ``rows``."""
    grid = (source.shape[0], cdiv(max(width, 1), _TILE))
    gather_block_tables_kernel[grid](
        batch, request_tables, rows, source, request_tables.shape[1], width, BLOCK=_TILE, **_OPTIONS
    )


def write_cells(batch: Tensor, request_tables: Tensor, rows: Tensor, cells: Tensor, ids: Tensor) -> None:
    """Write ids at ``cells`` (batch row * width + column) of the batch's table, and in ``rows`` of the requests'."""
    num_cells = cells.shape[0]
    write_block_ids_kernel[(cdiv(num_cells, _TILE),)](
        batch, request_tables, rows, cells, ids, batch.shape[1], num_cells, BLOCK=_TILE, **_OPTIONS
    )
