"""What a device does with a step that was sent to it: three functions, each one launch on CUDA (a group, if of groups).

The host sends what only it knows. All else is made where it is needed, of what is there: positions and lengths of the
counts, slots of the tables, and the padding of everything. Each form writes the same bits as staging in place does.

Shapes: R real rows, T real tokens, n cells or places, C columns of a table, M request rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.metadata.dispatch import Implementations
from bateleur.metadata.fields import NULL_BLOCK, PAD_SLOT


@dataclass(frozen=True, slots=True)
class DeviceFields:
    """The device fields of a batch, whole; ``slots`` with the table and block size of each group that has slots."""

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    slots: tuple[tuple[Tensor, Tensor, int], ...]
    seq_len_fill: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step as it comes to the device; tensors are there.

    Attributes:
        num_reqs, num_tokens: R and T.
        rows_end, tokens_end: entries behind these are padded already.
        computed: (R,) integer.
        starts: (R + 1,) int32; None where ``query_start_loc`` stays as it is.
        token_ids: (T - k,) int32 for the last of the T tokens; the ids of the others come from elsewhere.
    """

    num_reqs: int
    num_tokens: int
    rows_end: int
    tokens_end: int
    computed: Tensor
    starts: Tensor | None
    token_ids: Tensor


def expand(fields: DeviceFields, step: DeviceStep) -> None:
    """Write every device field but the tables, which are written already, and the ids that come from elsewhere."""
    EXPAND.on(fields.seq_lens)(fields, step)


def gather_block_tables(batch: Tensor, resident: Tensor, rows: Tensor, source: Tensor, width: int) -> None:
    """Compose the tables of the leading n places of a batch, of the first ``width`` columns.

    batch: (R, C) int32. resident: (M + 1, C) int32, of which the last row is null. rows: (R,) int32, gets the request
    row of each place. source: (n,) int32: a request row; M for a place without one; -1 - row for a row that begins
    anew, and is null in both.
    """
    GATHER.on(batch)(batch, resident, rows, source, width)


def write_cells(batch: Tensor, resident: Tensor, rows: Tensor, cells: Tensor, ids: Tensor) -> None:
    """Write (n,) ids to cells, place * C + column, of the batch, and of the request rows in these places."""
    CELLS.on(batch)(batch, resident, rows, cells, ids)


def _expand(fields: DeviceFields, step: DeviceStep) -> None:
    num_reqs, num_tokens, starts = step.num_reqs, step.num_tokens, fields.query_start_loc
    rows_end, tokens_end, device = step.rows_end, step.tokens_end, starts.device
    if step.starts is not None:
        starts[: num_reqs + 1] = step.starts
        starts[num_reqs + 1 :] = num_tokens
    begin, computed = starts[:num_reqs], step.computed.int()
    lens = starts[1 : num_reqs + 1] - begin
    for field, values, pad in (
        (fields.num_computed_tokens, computed, 0),
        (fields.seq_lens, computed + lens, fields.seq_len_fill),
    ):
        field[:num_reqs] = values
        field[num_reqs:rows_end] = pad
    first = num_tokens - len(step.token_ids)
    fields.input_ids[first:num_tokens] = step.token_ids
    fields.input_ids[num_tokens:tokens_end] = 0
    token = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row = torch.searchsorted(starts[1 : num_reqs + 1], token, right=True).clamp_(max=num_reqs - 1)
    positions = (token + (computed - begin).index_select(0, row)).long()
    fields.positions[:num_tokens] = positions
    fields.positions[num_tokens:tokens_end] = 0
    for slots, table, size in fields.slots:
        block = table[row, (positions // size).clamp_(max=table.shape[1] - 1)].long()
        slots[:num_tokens] = torch.where(block > NULL_BLOCK, block * size + positions % size, PAD_SLOT)
        slots[num_tokens:tokens_end] = PAD_SLOT


def _gather_block_tables(batch: Tensor, resident: Tensor, rows: Tensor, source: Tensor, width: int) -> None:
    places = source.shape[0]
    row = torch.where(source < 0, -1 - source, source).long()
    kept = resident.index_select(0, row)[:, :width] * (source >= 0).int()[:, None]
    resident[:, :width].index_copy_(0, row, kept)
    batch[:places, :width] = kept
    rows[:places] = row


def _write_cells(batch: Tensor, resident: Tensor, rows: Tensor, cells: Tensor, ids: Tensor) -> None:
    columns = batch.shape[1]
    place = cells.long() // columns
    column = cells - place * columns
    batch[place, column] = ids
    resident[rows[place].long(), column] = ids


_KERNELS = "bateleur.metadata.kernels.device_fields"
EXPAND = Implementations(_expand, triton=f"{_KERNELS}:expand")
GATHER = Implementations(_gather_block_tables, triton=f"{_KERNELS}:gather_block_tables")
CELLS = Implementations(_write_cells, triton=f"{_KERNELS}:write_cells")
