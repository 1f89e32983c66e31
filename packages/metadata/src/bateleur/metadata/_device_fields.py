"""Device-side staging: three functions that fill the device fields of a batch from one uploaded step.

Each is one launch on CUDA; ``expand`` takes one more for each further KV-cache group with slots.

Shapes: R real rows (requests), T real tokens, n entries, C columns of a block table, M rows of a table of all requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.metadata.dispatch import Implementations
from bateleur.metadata.fields import NULL_BLOCK, PAD_SLOT


@dataclass(frozen=True, slots=True)
class DeviceFields:
    """Device tensors of a batch at their full size. ``slots``: (slot mapping, block table, block size) of each KV-cache
    group with slots. ``seq_len_fill``: ``seq_lens`` of padded rows.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    slots: tuple[tuple[Tensor, Tensor, int], ...]
    seq_len_fill: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Values of a step on the device: ``num_computed_tokens`` (R,) integer, ``query_start_loc`` (R + 1,) int32, which
    may be a view of ``DeviceFields.query_start_loc``, and ``token_ids`` (T - k,) int32 of the tokens after the first k.
    The first k are missing because the last step sampled them, and their ids are on the device already.
    """

    num_reqs: int
    num_tokens: int
    num_computed_tokens: Tensor
    query_start_loc: Tensor
    token_ids: Tensor


def expand(fields: DeviceFields, step: DeviceStep) -> None:
    """Write all device fields of a batch but the ids of its first tokens (see `DeviceStep`). Reads the block tables."""
    EXPAND.on(fields.seq_lens)(fields, step)


def gather_block_tables(batch: Tensor, request_tables: Tensor, rows: Tensor, source: Tensor, width: int) -> None:
    """Fill the first ``width`` columns of a batch's block table from the tables of all requests.

    request_tables: (M + 1, C); the last row stays null. source: (n,) int32, for each batch row the row of
    ``request_tables`` to copy, M if unused, or ``-1 - row`` to set the batch row and this row of ``request_tables`` to
    null. rows: int32, receives the row of ``request_tables`` for each batch row.
    """
    GATHER.on(batch)(batch, request_tables, rows, source, width)


def write_cells(batch: Tensor, request_tables: Tensor, rows: Tensor, cells: Tensor, ids: Tensor) -> None:
    """Write n new block ids to a batch's block table and to the tables of all requests.

    cells: (n,) int32, ``batch row * C + column``. rows, request_tables: as `gather_block_tables` left them.
    """
    CELLS.on(batch)(batch, request_tables, rows, cells, ids)


def _expand(fields: DeviceFields, step: DeviceStep) -> None:
    num_reqs, num_tokens, starts = step.num_reqs, step.num_tokens, step.query_start_loc
    computed, lens = step.num_computed_tokens.int(), starts.diff()
    first = num_tokens - len(step.token_ids)
    token = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=num_reqs - 1)
    positions = (token + (computed - starts[:-1]).index_select(0, row)).long()
    for field, begin, values, pad in (
        (fields.query_start_loc, 0, starts, num_tokens),
        (fields.num_computed_tokens, 0, computed, 0),
        (fields.seq_lens, 0, computed + lens, fields.seq_len_fill),
        (fields.input_ids, first, step.token_ids, 0),
        (fields.positions, 0, positions, 0),
    ):
        end = begin + len(values)
        field[begin:end], field[end:] = values, pad
    for slots, table, size in fields.slots:
        block = table[row, (positions // size).clamp_(max=table.shape[1] - 1)].long()
        slots[:num_tokens] = torch.where(block > NULL_BLOCK, block * size + positions % size, PAD_SLOT)
        slots[num_tokens:] = PAD_SLOT


def _gather_block_tables(batch: Tensor, request_tables: Tensor, rows: Tensor, source: Tensor, width: int) -> None:
    places = source.shape[0]
    row = torch.where(source < 0, -1 - source, source).long()
    kept = request_tables.index_select(0, row)[:, :width] * (source >= 0).int()[:, None]
    request_tables[:, :width].index_copy_(0, row, kept)
    batch[:places, :width] = kept
    rows[:places] = row


def _write_cells(batch: Tensor, request_tables: Tensor, rows: Tensor, cells: Tensor, ids: Tensor) -> None:
    place, column = cells.long() // batch.shape[1], cells % batch.shape[1]
    batch[place, column] = ids
    request_tables[rows[place].long(), column] = ids


_KERNELS = "bateleur.metadata.kernels.device_fields"
EXPAND = Implementations(_expand, triton=f"{_KERNELS}:expand")
GATHER = Implementations(_gather_block_tables, triton=f"{_KERNELS}:gather_block_tables")
CELLS = Implementations(_write_cells, triton=f"{_KERNELS}:write_cells")
