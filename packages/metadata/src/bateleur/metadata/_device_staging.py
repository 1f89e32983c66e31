"""Staging: one upload of the values that only the host knows; the device computes the rest."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bateleur.metadata._device_fields import DeviceFields, DeviceStep, expand, gather_block_tables, write_cells
from bateleur.metadata._memory import DeviceQueue, PackedUpload
from bateleur.metadata._step_values import StepLengths, used_table
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import FIELDS, PAD_SLOT
from bateleur.metadata.seq_len_bound import IntArray
from bateleur.metadata.step_inputs import KVCacheGroup, StepRows


class _Call(NamedTuple):
    """Device work ``function(*tensors, *arrays, *sizes)``. ``uploaded``: indices of ``arrays`` in the step's upload."""

    function: Callable[..., None]
    tensors: Sequence[Tensor]
    uploaded: Sequence[int]
    sizes: Sequence[int] = ()

    def run(self, parts: Sequence[Tensor]) -> None:
        self.function(*self.tensors, *(parts[index] for index in self.uploaded), *self.sizes)


class DeviceStaging:
    """Uploads every step from new pinned memory, so that several steps may be in flight.

    The device holds the block tables of all requests in addition to the batch's. If a request moves to another
    batch row, its block table is copied there on the device.
    """

    def __init__(
        self,
        tensors: Mapping[str, Sequence[Tensor]],
        groups: Sequence[KVCacheGroup],
        tables: Sequence[BlockTable],
        queue: DeviceQueue,
        seq_len_fill: int,
    ) -> None:
        """tensors: full-size arrays of each field by its name, one per KV-cache group if the field is per group.
        tables: block tables of all requests; empty if steps upload them. queue: runs the device work.
        seq_len_fill: ``seq_lens`` of padded rows.
        """
        self._tensors, self._groups, self._queue = tensors, groups, queue
        self._request_tables, self._tables = tables, tensors["block_tables"]
        self._num_request_rows = len(tables[0].ids) if tables else 0
        self._device = tensors["seq_lens"][0].device
        slots = zip(tensors["slot_mappings"], self._tables, groups, strict=True)
        self._fields = DeviceFields(
            tensors["input_ids"][0],
            tensors["positions"][0],
            tensors["query_start_loc"][0],
            tensors["seq_lens"][0],
            tensors["num_computed_tokens"][0],
            tuple((mapping, table, group.block_size) for mapping, table, group in slots if group.has_slots),
            seq_len_fill,
        )
        # By group: block table of the batch, block tables of all requests and of none, request row of each batch row.
        self._memories = [
            (batch, batch.new_zeros(self._num_request_rows + 1, batch.shape[1]), batch.new_zeros(batch.shape[0]))
            for batch in (self._tables if tables else ())
        ]
        queue.launch(self._warm_up)

    def _warm_up(self) -> None:
        """Run the table kernels once without effect, so that no later step loads a kernel."""
        for batch, request_tables, rows in self._memories:
            no_rows, zero = torch.full_like(rows, self._num_request_rows), torch.zeros_like(rows[:1])
            gather_block_tables(batch, request_tables, rows, no_rows, batch.shape[1])
            write_cells(batch, request_tables, rows, zero, zero)

    def forget(self) -> None:
        """Treat every entry of the buffers as unknown, so that the next step writes all of them."""
        self._num_places = self._fields.seq_lens.shape[0]  # leading rows of the batch's tables that may hold blocks
        self._columns = [group.max_blocks for group in self._groups]  # leading columns that may hold blocks
        self._unpadded = list(self._tensors["slot_mappings"])
        self._starts: IntArray = np.empty(0, np.int32)  # in `query_start_loc`; empty if unknown
        self._forget_batch()
        for table in self._request_tables:
            table.mark_all_unstaged()

    def _forget_batch(self) -> None:
        """Clear the host's record of the request in each batch row, because a step uploaded block tables without
        naming their requests. Device data do not change.
        """
        self._batch_row_of: IntArray = np.full(self._num_request_rows, -1, np.int64)  # -1: not in the batch
        self._rows: IntArray = self._batch_row_of[:0]  # request row of each batch row
        self._num_clears = -1

    def poison(self) -> None:
        """Fill all buffers with invalid values (the `poison` of each field), so that stale reads show in tests."""

        def fill() -> None:
            for name, tensors in self._tensors.items():
                for tensor in tensors if not FIELDS[name].on_host else ():
                    tensor.fill_(FIELDS[name].poison)

        self._queue.launch(fill)

    def write(self, rows: StepRows, shape: BatchShape, lengths: StepLengths) -> None:
        packet, computed = PackedUpload(), rows.num_computed_tokens_device
        counts = packet.add(rows.num_computed_tokens) if computed is None else 0
        known = np.array_equal(lengths.starts, self._starts)
        starts = 0 if known else packet.add(lengths.starts)
        first = 0 if rows.sampled_token_ids is None else len(rows.sampled_token_ids)
        ids = packet.add(rows.token_ids[first:])
        if rows.block_table_rows is None:
            calls = self._send_tables(packet, rows, lengths)
        else:
            calls = self._send_cells(packet, rows.block_table_rows)
        parts = packet.send(self._queue, self._device)
        computed = parts[counts] if computed is None else computed
        begins = self._fields.query_start_loc[: shape.num_reqs + 1] if known else parts[starts]
        step = DeviceStep(shape.num_reqs, shape.num_tokens, computed, begins, parts[ids])
        self._starts = lengths.starts
        unpadded, self._unpadded = self._unpadded, []

        def run() -> None:
            for slots in unpadded:  # those of groups without slots are not written again
                slots.fill_(PAD_SLOT)
            for call in calls:
                call.run(parts)
            expand(self._fields, step)

        self._queue.launch(run)
        if rows.sampled_token_ids is not None:
            self._queue.copy(self._fields.input_ids[:first], rows.sampled_token_ids)

    def _send_tables(self, packet: PackedUpload, rows: StepRows, lengths: StepLengths) -> list[_Call]:
        """Add block tables of a step without ``block_table_rows`` to the upload; return the work that copies them."""
        calls: list[_Call] = []
        self._forget_batch()
        for index, (table, group) in enumerate(zip(rows.block_tables, self._groups, strict=True)):
            used = used_table(table, group, lengths)
            num_rows, width = used.shape
            ends = max(self._num_places, num_rows), max(self._columns[index], width)
            target = self._tables[index][: ends[0], : ends[1]]
            calls.append(_Call(_put_table, [target], uploaded=[packet.add(used)], sizes=[num_rows, width]))
            self._columns[index] = width
        self._num_places = len(rows.query_lens)
        return calls

    def _send_cells(self, packet: PackedUpload, rows: IntArray) -> list[_Call]:
        """Add changed batch rows and new block ids to the upload; return the work that updates the block tables.

        rows: (R,) row of each request in the block tables of all requests.
        """
        calls: list[_Call] = []
        num_clears = sum(table.num_clears for table in self._request_tables)
        moved = num_clears != self._num_clears or not np.array_equal(rows, self._rows)
        if moved:  # some batch rows may hold block ids of another request
            self._batch_row_of[self._rows] = -1
            self._batch_row_of[rows] = np.arange(len(rows))
            self._rows, self._num_clears = rows.copy(), num_clears
        for index, (table, memory) in enumerate(zip(self._request_tables, self._memories, strict=True)):
            cells = table.take_writes(self._batch_row_of, moved)
            width = self._columns[index] = max(self._columns[index], table.width)
            if moved:
                source: IntArray = np.full(max(len(rows), self._num_places), self._num_request_rows)
                source[: len(rows)] = np.where(table.cleared[rows], -1 - rows, rows)
                table.cleared[rows] = False
                calls.append(_Call(gather_block_tables, memory, uploaded=[packet.add(source)], sizes=[width]))
            if cells is not None:
                places, columns, ids = cells
                where = packet.add(places * self._tables[index].shape[1] + columns)
                calls.append(_Call(write_cells, memory, uploaded=[where, packet.add(ids)]))
        if moved:
            self._num_places = len(rows)
        return calls


def _put_table(target: Tensor, uploaded: Tensor, num_rows: int, width: int) -> None:
    """Write the uploaded table to ``target``, and set the other rows and columns of ``target`` to the null block."""
    target.zero_()
    target[:num_rows, :width] = uploaded.view(num_rows, width)
