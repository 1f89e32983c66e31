"""Staging: one upload of the values that only the host knows; the device computes the rest."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata._device_fields import DeviceFields, DeviceStep, expand, gather_block_tables, write_cells
from bateleur.metadata._memory import Buffer, DeviceQueue, PackedUpload
from bateleur.metadata._step_values import StepLengths, StepValues
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import LeadingDim
from bateleur.metadata.seq_len_bound import BoolArray, I32Array, IntArray
from bateleur.metadata.step_inputs import StepRows

_Tables: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Block table of the batch, block tables of all requests, and the request row of each batch row."""

Work: TypeAlias = Callable[[Sequence[Tensor]], None]
"""Device work that reads the uploaded arrays."""


class DeviceStaging:
    """Uploads every step from new pinned memory, so that several steps may be in flight.

    The device holds the block tables of all requests in addition to the batch's. If a request moves to another
    batch row, its block table is copied there on the device.
    """

    def __init__(
        self,
        values: StepValues,
        buffers: Sequence[Buffer],
        tables: Sequence[BlockTable],
        device: torch.device,
        queue: DeviceQueue,
        seq_len_fill: int,
    ) -> None:
        self._values, self._mirror, self._device, self._queue = values, BlockTableMirror(tables), device, queue
        self._buffers = tuple(buffers)
        self._tables = [b.tensor for b in buffers if b.field.leading_dim is LeadingDim.REQS_BY_BLOCKS]
        named = {b.name: b.tensor for b in buffers}
        slots = tuple(
            (named[f"slot_mappings.{index}"], self._tables[index], group.block_size)
            for index, group in enumerate(values.groups)
            if group.has_slots
        )
        self._fields = DeviceFields(
            named["input_ids"],
            named["positions"],
            named["query_start_loc"],
            named["seq_lens"],
            named["num_computed_tokens"],
            slots,
            seq_len_fill,
        )
        rows = values.limits.max_num_reqs
        self._request_tables = [
            torch.zeros((self._mirror.num_rows + 1, table.ids.shape[1]), dtype=torch.int32, device=device)
            for table in tables
        ]
        self._rows = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in tables]
        queue.launch(self._warm_up)

    def _warm_up(self) -> None:
        """Run the table kernels once without effect, so that no later step loads a kernel."""
        for batch, request_tables, rows in zip(self._tables, self._request_tables, self._rows, strict=False):
            no_rows = torch.full_like(rows, self._mirror.num_rows)
            gather_block_tables(batch, request_tables, rows, no_rows, batch.shape[1])
            write_cells(batch, request_tables, rows, torch.zeros_like(rows[:1]), torch.zeros_like(rows[:1]))

    def forget(self) -> None:
        """Treat every entry of the buffers as unknown, so that the next step writes all of them."""
        limits = self._values.limits
        self._dirty_rows = self._dirty_places = limits.max_num_reqs
        self._dirty_tokens = limits.max_num_tokens
        self._columns = [group.max_blocks for group in self._values.groups]
        self._unpadded = True
        self._mirror.forget_all()

    def poison(self) -> None:
        """Fill all buffers with invalid values (the `poison` of each field), so that stale reads show in tests."""

        def fill() -> None:
            for buffer in self._buffers:
                buffer.tensor.fill_(buffer.field.poison)

        self._queue.launch(fill)

    def write(self, rows: StepRows, shape: BatchShape, lengths: StepLengths, starts: I32Array | None) -> None:
        """Upload the step and launch the kernels. ``starts``: first token of each request; None: as before."""
        packet, work = PackedUpload(), self._pad_once()
        truth = packet.add(rows.num_computed_tokens) if rows.num_computed_tokens_device is None else 0
        begins = None if starts is None else packet.add(starts)
        first = 0 if rows.sampled_token_ids is None else rows.sampled_token_ids.shape[0]
        ids = packet.add(rows.token_ids[first:])
        if rows.block_table_rows is None:
            self._mirror.forget_batch()
            work += self._send_tables(packet, rows, lengths)
        else:
            work += self._send_cells(packet, rows.block_table_rows)
        parts = packet.send(self._queue, self._device)
        step = DeviceStep(
            shape.num_reqs,
            shape.num_tokens,
            max(shape.num_reqs, self._dirty_rows),
            max(shape.num_tokens, self._dirty_tokens),
            parts[truth] if rows.num_computed_tokens_device is None else rows.num_computed_tokens_device,
            None if begins is None else parts[begins],
            parts[ids],
        )
        self._dirty_rows, self._dirty_tokens = shape.num_reqs, shape.num_tokens

        def run() -> None:
            for each in work:
                each(parts)
            expand(self._fields, step)

        self._queue.launch(run)
        if rows.sampled_token_ids is not None:
            self._queue.copy(self._fields.input_ids[:first], rows.sampled_token_ids)

    def _pad_once(self) -> list[Work]:
        """Return device work that pads the slot mappings of groups without slots; no work after the first call."""
        if not self._unpadded:
            return []
        self._unpadded = False
        idle = [b for b in self._buffers if b.name.startswith("slot_mappings.")]
        return [partial(_fill, each.tensor, each.pad) for each in idle]

    def _send_tables(self, packet: PackedUpload, rows: StepRows, lengths: StepLengths) -> list[Work]:
        """Add block tables of a step without ``block_table_rows`` to the upload; return the work that copies them."""
        work: list[Work] = []
        for index, table in enumerate(rows.block_tables):
            masked = self._values.used_table(index, table, lengths)
            width = masked.shape[1]
            ends = max(self._dirty_places, len(table)), max(self._columns[index], width)
            target = self._tables[index][: ends[0], : ends[1]]
            work.append(partial(_put_table, target, masked.shape, packet.add(masked)))
            self._columns[index] = width
        self._dirty_places = len(rows.query_lens)
        return work

    def _send_cells(self, packet: PackedUpload, rows: IntArray) -> list[Work]:
        """Add changed batch rows and new block ids to the upload; return the work that updates the block tables."""
        moved, work = self._mirror.place_rows(rows), list[Work]()
        for index, batch in enumerate(self._tables):
            table, memory = self._mirror.tables[index], (batch, self._request_tables[index], self._rows[index])
            cells = table.take_writes(self._mirror.batch_row_of, moved is not None)
            width = self._columns[index] = max(self._columns[index], table.width)
            if moved is not None:
                source: IntArray = np.full(max(len(rows), self._dirty_places), self._mirror.num_rows)
                source[: len(rows)] = np.where(table.cleared[rows], -1 - rows, rows)
                table.cleared[rows] = False
                work.append(partial(_gather, memory, packet.add(source), width))
            if cells is not None:
                places, columns, ids = cells
                where, what = packet.add(places * batch.shape[1] + columns), packet.add(ids)
                work.append(partial(_write, memory, where, what))
        if moved is not None:
            self._dirty_places = len(rows)
        return work


class BlockTableMirror:
    """Tracks which row of the batch holds each request, by the request's row in its :class:`BlockTable`.

    Attributes:
        batch_row_of: (M,) batch row of each request row, -1 if it is not in the batch.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.num_rows = len(tables[0].ids) if tables else 0
        self.forget_batch()

    def forget_batch(self) -> None:
        """Treat the batch as empty, because a step uploaded block tables without naming their requests."""
        self.batch_row_of: IntArray = np.full(self.num_rows, -1, np.int64)
        self._rows: IntArray = self.batch_row_of[:0]
        self._rows_bytes = b""
        self._num_clears = -1

    def forget_all(self) -> None:
        """Treat all block tables on the device as unknown, so that the next step uploads all block ids."""
        self.forget_batch()
        for table in self.tables:
            table.mark_all_unstaged()

    def place_rows(self, rows: IntArray) -> BoolArray | None:
        """Assign the requests in rows `rows` (R,) of the block tables to batch rows 0 to R - 1.

        Returns (R,) bool, True for batch rows that still hold block ids of another request; None if there are none.
        """
        num_clears = sum(table.num_clears for table in self.tables)
        rows_bytes = rows.tobytes()
        if rows_bytes == self._rows_bytes and num_clears == self._num_clears:
            return None
        moved: BoolArray = np.ones(len(rows), np.bool_)
        both = min(len(rows), len(self._rows))
        np.not_equal(rows[:both], self._rows[:both], out=moved[:both])
        for table in self.tables:
            moved |= table.cleared[rows]
        self.batch_row_of[self._rows] = -1
        self.batch_row_of[rows] = np.arange(len(rows))
        self._rows, self._rows_bytes, self._num_clears = rows.copy(), rows_bytes, num_clears
        return moved


def _fill(tensor: Tensor, value: Any, parts: Sequence[Tensor]) -> None:
    del parts
    tensor.fill_(value)


def _put_table(target: Tensor, shape: tuple[int, ...], table: int, parts: Sequence[Tensor]) -> None:
    """Write the uploaded table to ``target``, and set the other rows and columns of ``target`` to the null block.

    shape: shape of the uploaded table. parts: the uploaded arrays; ``table`` is the index of the table among them.
    """
    target.zero_()
    target[: shape[0], : shape[1]] = parts[table].view(shape)


def _gather(memory: _Tables, source: int, width: int, parts: Sequence[Tensor]) -> None:
    gather_block_tables(*memory, parts[source], width)


def _write(memory: _Tables, cells: int, ids: int, parts: Sequence[Tensor]) -> None:
    write_cells(*memory, parts[cells], parts[ids])
