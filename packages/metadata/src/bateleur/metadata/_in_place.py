"""Staging where the host writes the memory that kernels read: on a CPU, in numpy, without a copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bateleur.metadata._followed import FollowedTables
from bateleur.metadata._memory import Buffer
from bateleur.metadata._values import Computed, StepValues
from bateleur.metadata.batch import BatchShape
from bateleur.metadata.bounds import I32Array
from bateleur.metadata.fields import NULL_BLOCK, Axis
from bateleur.metadata.forms import load
from bateleur.metadata.rows import StepRows


class InPlace:
    """Writes the device fields of every step over those of the step before."""

    def __init__(
        self, values: StepValues, buffers: Sequence[Buffer], followed: FollowedTables, upper: Buffer
    ) -> None:
        self._values, self._followed = values, followed
        self._starts = next(b for b in buffers if b.field.axis is Axis.REQ_PLUS_1)
        self._of_rows = [b for b in buffers if b.field.axis is Axis.REQ]
        self._of_tokens = [b for b in buffers if b.field.axis is Axis.TOKEN and not b.field.per_group]
        self._slots = [b for b in buffers if b.field.axis is Axis.TOKEN and b.field.per_group]
        self._tables = [b for b in buffers if b.field.axis is Axis.REQ_BLOCK]
        self._buffers = tuple(buffers)
        self._ids = next(b.host for b in buffers if b.name == "input_ids")
        self._stage = load("bateleur.metadata.native.places:kernel")("stage_rows")
        self._address = load("bateleur.metadata.native:address")
        at = {buffer.name: buffer.host.ctypes.data for buffer in (*buffers, upper)}
        names = ("seq_lens", "num_computed_tokens", upper.name, "positions", "input_ids")
        groups = [
            (
                table.ids.ctypes.data,
                table.ids.shape[1],
                each.group.block_size,
                at[f"slot_mappings.{each.index}"],
            )
            for each, table in zip(values.groups, followed.tables, strict=False)
            if each.group.has_slots
        ]
        book = [values.limits.max_model_len, *(at[name] for name in names), len(groups), *sum(groups, ())]
        self._book = np.array(book, np.int64)
        self._book_address = self._address(self._book)
        self._known: tuple[object, int, int] = (None, 0, 0)
        """Rows that were staged again last, and where their numbers and token counts lie."""

    def forget(self) -> None:
        """Every entry may hold anything."""
        for buffer in self._buffers:
            buffer.dirty = len(buffer.host)
        self._columns = [group.group.max_blocks for group in self._values.groups]

    def poison(self) -> None:
        """Fill everything with poison."""
        for buffer in self._buffers:
            buffer.host[...] = buffer.field.poison

    def check(self, rows: StepRows, computed: Computed, real: bool, later: bool) -> Any:
        """Positions, and slots of each group; refuses a token without a block.

        ``later``: of the rows that were staged last, see :meth:`StepRows.later`.
        """
        values = self._values
        if later and computed.single and rows.table_rows is not None and self._followed.none_cleared():
            positions = values.positions(rows, computed)
            return positions, values.slots_later(rows, positions)
        return values.places(rows, computed, real)

    def again(self, rows: StepRows, shape: BatchShape) -> int:
        """Stage rows that were staged last, see :meth:`StepRows.later`: all of it in C, where there is a compiler.

        Returns the length of the longest behind the step, or 0 if nothing was written: who checks them knows more.
        """
        sampled, computed = rows.sampled, rows.num_computed
        if (
            self._stage is None
            or sampled is None
            or rows.table_rows is None
            or not computed.flags.c_contiguous
        ):
            return 0
        if (
            sampled.shape[0] != shape.num_tokens
            or sampled.dtype != torch.int64
            or not sampled.is_contiguous()
        ):
            return 0
        if self._known[0] is not rows.kin:
            dense = rows.table_rows.flags.c_contiguous and rows.query_lens.flags.c_contiguous
            if not dense or not shape.num_reqs:
                return 0
            self._known = rows.kin, self._address(rows.table_rows), self._address(rows.query_lens)
        longest: int = self._stage(
            self._book_address, *self._known[1:], self._address(computed), shape.num_reqs, sampled.data_ptr()
        )
        if longest and not self._followed.unchanged():
            if self._followed.none_cleared():
                self._write_news(moved=False)
            else:
                self._follow_tables(rows.table_rows)
        return longest

    def end(self, shape: BatchShape, starts: I32Array | None) -> None:
        """What :meth:`again` staged has other lengths than what was staged before. ``starts``: as for :meth:`write`."""
        self._write_starts(shape, starts)
        for buffer in (*self._of_tokens, *self._slots):
            if buffer.dirty > shape.num_tokens:
                buffer.host[shape.num_tokens : buffer.dirty] = buffer.pad
            buffer.dirty = shape.num_tokens

    def write(
        self,
        rows: StepRows,
        shape: BatchShape,
        computed: Computed,
        checked: Any,
        starts: I32Array | None,
        later: bool,
    ) -> None:
        """Write what was checked. ``starts``: None where they stay as they are."""
        positions, slots = checked
        self._write_starts(shape, starts)
        values = {
            "seq_lens": computed.seq_lens,
            "num_computed_tokens": computed.before,
            "input_ids": rows.token_ids,
            "positions": positions,
        }
        for buffer in self._of_rows:
            buffer.put(values[buffer.name], shape.num_reqs)
        sampled = rows.sampled
        known = later and sampled is not None and sampled.shape[0] == shape.num_tokens
        for buffer in self._of_tokens:
            if not (known and buffer.host is self._ids):
                buffer.put(values[buffer.name], shape.num_tokens)
        for buffer, slot in zip(self._slots, slots, strict=True):
            if len(slot) or buffer.dirty:
                buffer.put(slot, len(slot))
        if rows.table_rows is None:
            self._followed.lose()
            self._write_tables(rows, computed)
        elif not later or not self._followed.unchanged():
            self._follow_tables(rows.table_rows)
        if rows.sampled is not None:
            self._ids[: rows.sampled.shape[0]] = rows.sampled.numpy()

    def _write_starts(self, shape: BatchShape, starts: I32Array | None) -> None:
        if starts is not None:
            self._starts.pad, self._starts.dirty = shape.num_tokens, len(self._starts.host)
            self._starts.put(starts, len(starts))

    def _write_tables(self, rows: StepRows, computed: Computed) -> None:
        columns = self._columns
        for index, (buffer, table) in enumerate(zip(self._tables, rows.block_tables, strict=True)):
            group, host = self._values.groups[index], buffer.host
            num_rows, width = len(table), group.width(computed.longest)
            group.write_table(table, computed.upper, host[:num_rows, :width])
            if columns[index] > width:
                host[:num_rows, width : columns[index]] = NULL_BLOCK
            self._end(index, buffer, num_rows, max(columns[index], width))
            columns[index] = width

    def _follow_tables(self, rows: Any) -> None:
        """Rows that have no new place get new cells only."""
        moved = self._followed.place(rows)
        self._write_news(moved=moved is not None)
        if moved is None:
            return
        places = moved.nonzero()[0]
        for index, buffer in enumerate(self._tables):
            table, width = self._followed.tables[index], self._columns[index]
            buffer.host[places, :width] = table.ids[rows[places], :width]
            table.fresh[rows] = False
            self._end(index, buffer, len(rows), width)

    def _write_news(self, *, moved: bool) -> None:
        """Cells that were written of rows with a place."""
        for index, table in enumerate(self._followed.tables):
            if moved or not table.untouched:
                self._followed.write_news(index, moved, self._tables[index].host)
                self._columns[index] = max(self._columns[index], table.width)

    def _end(self, index: int, buffer: Buffer, num_rows: int, width: int) -> None:
        """The places behind these rows hold none."""
        if buffer.dirty > num_rows:
            buffer.host[num_rows : buffer.dirty, :width] = NULL_BLOCK
        buffer.dirty = num_rows
