"""Staging for a GPU: one upload of the values that only the host knows; the device computes the rest."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata._block_table_mirror import BlockTableMirror
from bateleur.metadata._device_fields import DeviceFields, DeviceStep, expand, gather_block_tables, write_cells
from bateleur.metadata._memory import Buffer, DeviceQueue, PackedUpload
from bateleur.metadata._step_values import StepLengths, StepValues
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import LeadingDim
from bateleur.metadata.seq_len_bound import I32Array, IntArray
from bateleur.metadata.step_inputs import StepRows

_Tables: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Block table of the batch, block tables of all requests, and the request row of each batch row."""

Work: TypeAlias = Callable[[Sequence[Tensor]], None]
"""Device work that reads the uploaded arrays."""


class DeviceStaging:
    """Uploads every step from new pinned memory, so that several steps may be in flight.

    The device holds the block tables of all requests in addition to the batch's. A request that moves to another batch
    row is copied there on the device.
    """

    def __init__(
        self,
        values: StepValues,
        buffers: Sequence[Buffer],
        mirror: BlockTableMirror,
        device: torch.device,
        queue: DeviceQueue,
        seq_len_fill: int,
    ) -> None:
        self._values, self._mirror, self._device, self._queue = values, mirror, device, queue
        self._buffers = tuple(buffers)
        self._tables = [b.tensor for b in buffers if b.field.leading_dim is LeadingDim.REQS_BY_BLOCKS]
        named = {b.name: b.tensor for b in buffers}
        slots = tuple(
            (named[f"slot_mappings.{index}"], self._tables[index], each.group.block_size)
            for index, each in enumerate(values.groups)
            if each.group.has_slots
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
            torch.zeros((mirror.num_rows + 1, table.ids.shape[1]), dtype=torch.int32, device=device)
            for table in mirror.tables
        ]
        self._rows = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in mirror.tables]
        queue.launch(self._warm_up)

    def _warm_up(self) -> None:
        """Run the table kernels once without effect, so that no later step loads a kernel."""
        for batch, request_tables, rows in zip(self._tables, self._request_tables, self._rows, strict=False):
            no_rows = torch.full_like(rows, self._mirror.num_rows)
            gather_block_tables(batch, request_tables, rows, no_rows, batch.shape[1])
            write_cells(batch, request_tables, rows, torch.zeros_like(rows[:1]), torch.zeros_like(rows[:1]))

    def forget(self) -> None:
        """Treat every entry of the buffers as unknown, so that the next step defines all of them."""
        limits = self._values.limits
        self._dirty_rows = self._dirty_places = limits.max_num_reqs
        self._dirty_tokens = limits.max_num_tokens
        self._columns = [group.group.max_blocks for group in self._values.groups]
        self._unpadded = True

    def poison(self) -> None:
        """Fill all buffers with poison values."""

        def fill() -> None:
            for buffer in self._buffers:
                buffer.tensor.fill_(buffer.field.poison)

        self._queue.launch(fill)

    def check(self, rows: StepRows, lengths: StepLengths, real: bool, is_next_step: bool) -> None:
        """Raise ValueError if a token of the step has no KV block."""
        del is_next_step
        if real:
            self._values.check_blocks(rows, lengths)

    def write(
        self,
        rows: StepRows,
        shape: BatchShape,
        lengths: StepLengths,
        checked: None,
        starts: I32Array | None,
        is_next_step: bool,
    ) -> None:
        """Upload the step and launch the kernels. ``starts``: (R + 1,) row starts; None if equal to the last step's."""
        del is_next_step
        packet, work = PackedUpload(), self._pad_once()
        truth = packet.add(lengths.num_computed_tokens) if rows.num_computed_tokens_device is None else 0
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
        """Return the work that pads the slot mappings of groups without slots, once. No step writes these mappings."""
        if not self._unpadded:
            return []
        self._unpadded = False
        idle = [b for b in self._buffers if b.name.startswith("slot_mappings.")]
        return [partial(_fill, each.tensor, each.pad) for each in idle]

    def _send_tables(self, packet: PackedUpload, rows: StepRows, lengths: StepLengths) -> list[Work]:
        """Upload the whole block tables of a step that does not name rows of a :class:`BlockTable`."""
        work: list[Work] = []
        for index, table in enumerate(rows.block_tables):
            group = self._values.groups[index]
            width = group.width(lengths.longest)
            masked = np.empty((len(table), width), np.int32)
            group.write_table(table, lengths.upper, masked)
            ends = max(self._dirty_places, len(table)), max(self._columns[index], width)
            target = self._tables[index][: ends[0], : ends[1]]
            work.append(partial(_put_table, target, masked.shape, packet.add(masked)))
            self._columns[index] = width
        self._dirty_places = len(rows.query_lens)
        return work

    def _send_cells(self, packet: PackedUpload, rows: IntArray) -> list[Work]:
        """Upload which request is in which batch row, if that changed, and the new block ids."""
        moved, work = self._mirror.place_rows(rows), list[Work]()
        for index, batch in enumerate(self._tables):
            table, memory = (self._mirror.tables[index], (batch, self._request_tables[index], self._rows[index]))
            cells = self._mirror.take_writes(index, moved is not None)
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


def _fill(tensor: Tensor, value: Any, parts: Sequence[Tensor]) -> None:
    del parts
    tensor.fill_(value)


def _put_table(target: Tensor, shape: tuple[int, ...], table: int, parts: Sequence[Tensor]) -> None:
    """Write the uploaded table and set the other rows and columns of ``target`` to the null block."""
    target.zero_()
    target[: shape[0], : shape[1]] = parts[table].view(shape)


def _gather(memory: _Tables, source: int, width: int, parts: Sequence[Tensor]) -> None:
    gather_block_tables(*memory, parts[source], width)


def _write(memory: _Tables, cells: int, ids: int, parts: Sequence[Tensor]) -> None:
    write_cells(*memory, parts[cells], parts[ids])
