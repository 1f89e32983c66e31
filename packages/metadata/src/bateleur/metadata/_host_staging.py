"""Staging where the host writes the memory that kernels read: on a CPU, in numpy, without a copy."""

from collections.abc import Sequence
from typing import Any

from bateleur.metadata._block_table_mirror import BlockTableMirror
from bateleur.metadata._memory import Buffer
from bateleur.metadata._step_values import StepLengths, StepValues
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import NULL_BLOCK, LeadingDim
from bateleur.metadata.seq_len_bound import I32Array
from bateleur.metadata.step_inputs import StepRows


class HostStaging:
    """Writes the device fields of every step over those of the step before."""

    def __init__(self, values: StepValues, buffers: Sequence[Buffer], mirror: BlockTableMirror) -> None:
        self._values, self._mirror = values, mirror
        self._starts = next(b for b in buffers if b.field.leading_dim is LeadingDim.REQS_PLUS_1)
        self._of_rows = [b for b in buffers if b.field.leading_dim is LeadingDim.REQS]
        self._of_tokens = [
            b for b in buffers if b.field.leading_dim is LeadingDim.TOKENS and not b.field.per_group
        ]
        self._slots = [b for b in buffers if b.field.leading_dim is LeadingDim.TOKENS and b.field.per_group]
        self._tables = [b for b in buffers if b.field.leading_dim is LeadingDim.REQS_BY_BLOCKS]
        self._buffers = tuple(buffers)
        self._ids = next(b.host for b in buffers if b.name == "input_ids")

    def forget(self) -> None:
        """Every entry may hold anything."""
        for buffer in self._buffers:
            buffer.dirty = len(buffer.host)
        self._columns = [group.group.max_blocks for group in self._values.groups]

    def poison(self) -> None:
        """Fill everything with poison."""
        for buffer in self._buffers:
            buffer.host[...] = buffer.field.poison

    def check(self, rows: StepRows, computed: StepLengths, real: bool, repeats: bool) -> Any:
        """Positions, and slots of each group; refuses a token without a block.

        ``repeats``: of the rows that were staged last, see :meth:`StepRows.repeat`.
        """
        values = self._values
        if (
            repeats
            and computed.single_token
            and rows.block_table_rows is not None
            and self._mirror.none_cleared()
        ):
            positions = values.positions(rows, computed)
            return positions, values.slots_of_repeat(rows, positions)
        positions = values.positions(rows, computed)
        return positions, values.slots(rows, computed, positions, real)

    def write(
        self,
        rows: StepRows,
        shape: BatchShape,
        computed: StepLengths,
        checked: Any,
        starts: I32Array | None,
        repeats: bool,
    ) -> None:
        """Write what was checked. ``starts``: None where they stay as they are."""
        positions, slots = checked
        self._write_starts(shape, starts)
        values = {
            "seq_lens": computed.seq_lens,
            "num_computed_tokens": computed.num_computed_tokens,
            "input_ids": rows.token_ids,
            "positions": positions,
        }
        for buffer in self._of_rows:
            buffer.put(values[buffer.name], shape.num_reqs)
        sampled = rows.sampled_token_ids
        known = repeats and sampled is not None and sampled.shape[0] == shape.num_tokens
        for buffer in self._of_tokens:
            if not (known and buffer.host is self._ids):
                buffer.put(values[buffer.name], shape.num_tokens)
        for buffer, slot in zip(self._slots, slots, strict=True):
            if len(slot) or buffer.dirty:
                buffer.put(slot, len(slot))
        if rows.block_table_rows is None:
            self._mirror.forget_batch()
            self._write_tables(rows, computed)
        elif not repeats or not self._mirror.unchanged():
            self._follow_tables(rows.block_table_rows)
        if rows.sampled_token_ids is not None:
            self._ids[: rows.sampled_token_ids.shape[0]] = rows.sampled_token_ids.numpy()

    def _write_starts(self, shape: BatchShape, starts: I32Array | None) -> None:
        if starts is not None:
            self._starts.pad, self._starts.dirty = shape.num_tokens, len(self._starts.host)
            self._starts.put(starts, len(starts))

    def _write_tables(self, rows: StepRows, computed: StepLengths) -> None:
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
        moved = self._mirror.place_rows(rows)
        self._write_news(moved=moved is not None)
        if moved is None:
            return
        places = moved.nonzero()[0]
        for index, buffer in enumerate(self._tables):
            table, width = self._mirror.tables[index], self._columns[index]
            buffer.host[places, :width] = table.ids[rows[places], :width]
            table.cleared[rows] = False
            self._end(index, buffer, len(rows), width)

    def _write_news(self, *, moved: bool) -> None:
        """Cells that were written of rows with a place."""
        for index, table in enumerate(self._mirror.tables):
            if moved or not table.has_no_writes:
                self._mirror.copy_writes(index, moved, self._tables[index].host)
                self._columns[index] = max(self._columns[index], table.width)

    def _end(self, index: int, buffer: Buffer, num_rows: int, width: int) -> None:
        """The places behind these rows hold none."""
        if buffer.dirty > num_rows:
            buffer.host[num_rows : buffer.dirty, :width] = NULL_BLOCK
        buffer.dirty = num_rows
