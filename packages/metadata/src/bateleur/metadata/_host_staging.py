"""Staging for a CPU: numpy writes the batch fields in place, because kernels read the same memory."""

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
    """Overwrites the fields of the last step with those of the next one."""

    def __init__(self, values: StepValues, buffers: Sequence[Buffer], mirror: BlockTableMirror) -> None:
        self._values, self._mirror = values, mirror
        self._starts = next(b for b in buffers if b.field.leading_dim is LeadingDim.REQS_PLUS_1)
        self._of_rows = [b for b in buffers if b.field.leading_dim is LeadingDim.REQS]
        self._of_tokens = [b for b in buffers if b.field.leading_dim is LeadingDim.TOKENS and not b.field.per_group]
        self._slots = [b for b in buffers if b.field.leading_dim is LeadingDim.TOKENS and b.field.per_group]
        self._tables = [b for b in buffers if b.field.leading_dim is LeadingDim.REQS_BY_BLOCKS]
        self._buffers = tuple(buffers)
        self._ids = next(b.host for b in buffers if b.name == "input_ids")

    def forget(self) -> None:
        """Treat every entry of the buffers as unknown, so that the next step defines all of them."""
        for buffer in self._buffers:
            buffer.dirty = len(buffer.host)
        self._columns = [group.group.max_blocks for group in self._values.groups]

    def poison(self) -> None:
        """Fill all buffers with poison values."""
        for buffer in self._buffers:
            buffer.host[...] = buffer.field.poison

    def check(self, rows: StepRows, lengths: StepLengths, real: bool, is_next_step: bool) -> Any:
        """Compute positions (T,) and the slot mapping (T,) of each group.

        is_next_step: ``rows`` were made by :meth:`StepRows.next_step` from the rows that were staged last.

        Raises:
            ValueError: a token has no block.
        """
        values = self._values
        if is_next_step and lengths.single_token and rows.block_table_rows is not None and self._mirror.none_cleared():
            positions = values.positions(rows, lengths)
            return positions, values.slots_of_next_step(rows, positions)
        positions = values.positions(rows, lengths)
        return positions, values.slots(rows, lengths, positions, real)

    def write(
        self,
        rows: StepRows,
        shape: BatchShape,
        lengths: StepLengths,
        checked: Any,
        starts: I32Array | None,
        is_next_step: bool,
    ) -> None:
        """Write the step. ``checked``: result of :meth:`check`. ``starts``: (R + 1,) first token of each request;
        None if equal to the last step's.
        """
        positions, slots = checked
        self._write_starts(shape, starts)
        values = {
            "seq_lens": lengths.seq_lens,
            "num_computed_tokens": lengths.num_computed_tokens,
            "input_ids": rows.token_ids,
            "positions": positions,
        }
        for buffer in self._of_rows:
            buffer.put(values[buffer.name], shape.num_reqs)
        sampled = rows.sampled_token_ids
        known = is_next_step and sampled is not None and sampled.shape[0] == shape.num_tokens
        for buffer in self._of_tokens:
            if not (known and buffer.host is self._ids):
                buffer.put(values[buffer.name], shape.num_tokens)
        for buffer, slot in zip(self._slots, slots, strict=True):
            if len(slot) or buffer.dirty:
                buffer.put(slot, len(slot))
        if rows.block_table_rows is None:
            self._mirror.forget_batch()
            self._write_tables(rows, lengths)
        elif not is_next_step or not self._mirror.unchanged():
            self._follow_tables(rows.block_table_rows)
        if rows.sampled_token_ids is not None:
            self._ids[: rows.sampled_token_ids.shape[0]] = rows.sampled_token_ids.numpy()

    def _write_starts(self, shape: BatchShape, starts: I32Array | None) -> None:
        if starts is not None:
            self._starts.pad, self._starts.dirty = shape.num_tokens, len(self._starts.host)
            self._starts.put(starts, len(starts))

    def _write_tables(self, rows: StepRows, lengths: StepLengths) -> None:
        columns = self._columns
        for index, (buffer, table) in enumerate(zip(self._tables, rows.block_tables, strict=True)):
            group, host = self._values.groups[index], buffer.host
            num_rows, width = len(table), group.width(lengths.longest)
            group.write_table(table, lengths.upper, host[:num_rows, :width])
            if columns[index] > width:
                host[:num_rows, width : columns[index]] = NULL_BLOCK
            self._null_unused_rows(index, buffer, num_rows, max(columns[index], width))
            columns[index] = width

    def _follow_tables(self, rows: Any) -> None:
        """Copy to the batch whole table rows of requests that moved to another batch row, else only new block ids."""
        moved = self._mirror.place_rows(rows)
        self._write_new_ids(moved=moved is not None)
        if moved is None:
            return
        places = moved.nonzero()[0]
        for index, buffer in enumerate(self._tables):
            table, width = self._mirror.tables[index], self._columns[index]
            buffer.host[places, :width] = table.ids[rows[places], :width]
            table.cleared[rows] = False
            self._null_unused_rows(index, buffer, len(rows), width)

    def _write_new_ids(self, *, moved: bool) -> None:
        """Copy the block ids written since the last step to the batch rows of their requests."""
        for index, table in enumerate(self._mirror.tables):
            if moved or not table.has_no_writes:
                self._mirror.copy_writes(index, moved, self._tables[index].host)
                self._columns[index] = max(self._columns[index], table.width)

    def _null_unused_rows(self, index: int, buffer: Buffer, num_rows: int, width: int) -> None:
        """Set the table rows after the first ``num_rows`` to the null block."""
        if buffer.dirty > num_rows:
            buffer.host[num_rows : buffer.dirty, :width] = NULL_BLOCK
        buffer.dirty = num_rows
