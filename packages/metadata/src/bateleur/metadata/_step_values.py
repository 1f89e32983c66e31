"""From the rows of a step to the values its buffers get; numpy only, no loop over rows.

Shapes: R real rows, T real tokens, W columns of a block table that hold any block. A numpy call costs more than its
work here, and a call with a Python number or a reduction costs twice: hence the arrays of no dimension, and ``argmax``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import I32Array, IntArray
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_ONE = np.array(1, np.int32)
_NO_SLOTS: IntArray = np.empty(0, np.int64)
_SIGN = np.array(31, np.int32)
_NEGATIVE = 1 << 31  # where the negative half of int32 begins, seen as uint32


class StepLengths(NamedTuple):
    """How many tokens the rows of a step have.

    Attributes:
        before: (R,) int32, tokens before the step that device fields are made of.
        seq_lens: (R,) int32, with those of the step.
        upper: (R,) int32, the host's bounds of these.
        longest: the largest of the bounds, 0 for no rows.
        starts: (R + 1,) int32, first token of each row.
        single_token: every row has one token.
    """

    num_computed_tokens: I32Array
    seq_lens: I32Array
    upper: I32Array
    longest: int
    starts: I32Array
    single_token: bool


class StepValues:
    """Checks steps against ``limits`` and ``groups``, and computes what they stage. Keeps constants only."""

    def __init__(
        self, limits: BatchLimits, groups: tuple[KVCacheGroup, ...], tables: tuple[BlockTable, ...] = ()
    ) -> None:
        self.limits = limits
        self._tables = tables
        self._table_rows = len(tables[0].ids) if tables else 0
        self.groups = [_GroupValues(index, group, limits) for index, group in enumerate(groups)]
        self._iota: I32Array = np.arange(max(limits.max_num_tokens, limits.max_num_reqs) + 1, dtype=np.int32)
        self._ones = np.ones(limits.max_num_reqs, np.int32).tobytes()
        self._groups = groups

    def check_sizes(self, rows: StepRows, shape: BatchShape) -> None:
        """Refuse a step whose sizes do not fit the buffers or each other, naming field, value and rule."""
        limits = self.limits
        if shape.padded_reqs > limits.max_num_reqs:
            raise ValueError(f"padded_reqs: {shape.padded_reqs} is above max_num_reqs {limits.max_num_reqs}")
        if shape.padded_tokens > limits.max_num_tokens:
            raise ValueError(
                f"padded_tokens: {shape.padded_tokens} is above max_num_tokens {limits.max_num_tokens}"
            )
        rows.check_arrays(shape.num_reqs, shape.num_tokens, self._groups, self._table_rows)

    def one_token_each(self, rows: StepRows, shape: BatchShape) -> bool:
        """Whether every row computes exactly one token."""
        ones = rows.query_lens.tobytes() == self._ones[: 4 * shape.num_reqs]
        return ones and shape.num_tokens == shape.num_reqs

    def starts(self, rows: StepRows, shape: BatchShape, single_token: bool) -> I32Array:
        """First token of each row, and behind them the token count: (R + 1,). Refuses lengths that break the shape."""
        if single_token:
            return self._iota[: shape.num_reqs + 1]
        query_lens = rows.query_lens
        starts = np.zeros(shape.num_reqs + 1, np.int32)
        query_lens.cumsum(out=starts[1:])
        if starts[-1] != shape.num_tokens:
            raise ValueError(
                f"query_lens: sum to {query_lens.sum()}, but the shape has num_tokens {shape.num_tokens}"
            )
        if shape.num_reqs:
            shortest, longest = query_lens.argmin(), query_lens.argmax()
            if query_lens[shortest] < 1:
                raise ValueError(f"query_lens: {query_lens[shortest]} in row {shortest}; must be at least 1")
            if query_lens[longest] > shape.max_query_len:
                raise ValueError(
                    f"query_lens: {query_lens[longest]} is above the promised max_query_len {shape.max_query_len}"
                )
        return starts

    def computed(self, rows: StepRows, shape: BatchShape, on_host: bool) -> StepLengths:
        """The lengths of a step, checked; ``on_host``: the host reads device counts, for they are in its memory."""
        single_token = self.one_token_each(rows, shape)
        starts = self.starts(rows, shape, single_token)
        upper, longest = self._lengths(rows, single_token)
        if rows.num_computed_tokens_device is None or not on_host:
            return StepLengths(rows.num_computed_tokens, upper, upper, longest, starts, single_token)
        before = rows.num_computed_tokens_device.numpy().astype(np.int32)
        return StepLengths(before, before + rows.query_lens, upper, longest, starts, single_token)

    def computed_of_repeat(self, rows: StepRows, shape: BatchShape, last: StepLengths) -> StepLengths:
        """The same of rows that :meth:`StepRows.repeat` made of those of which ``last`` was computed."""
        rows.check_repeat(shape.num_reqs, shape.num_tokens)
        upper, longest = self._lengths(rows, last.single_token)
        return StepLengths(rows.num_computed_tokens, upper, upper, longest, last.starts, last.single_token)

    def _lengths(self, rows: StepRows, single_token: bool) -> tuple[I32Array, int]:
        """Upper bounds (R,) of the sequence lengths after the step, and the largest of them (0 for no rows)."""
        computed = rows.num_computed_tokens
        if not len(computed):
            return computed, 0
        unsigned = computed.view(np.uint32)
        top = unsigned.argmax()
        if unsigned[top] >= _NEGATIVE:
            raise ValueError(f"num_computed_tokens: {computed[top]} in row {top}; must not be negative")
        upper = computed + (_ONE if single_token else rows.query_lens)
        if (
            not single_token and computed[top] <= self.limits.max_model_len
        ):  # beyond, the sum may have wrapped
            top = upper.argmax()
        longest = int(computed[top]) + int(rows.query_lens[top])
        if longest > self.limits.max_model_len:
            raise ValueError(
                f"num_computed_tokens: row {top} would hold {longest} tokens, "
                f"above max_model_len {self.limits.max_model_len}"
            )
        return upper, longest

    def positions(self, rows: StepRows, computed: StepLengths) -> I32Array:
        """Position (T,) of each token."""
        if computed.single_token:
            return computed.num_computed_tokens
        positions = (computed.num_computed_tokens - computed.starts[:-1]).repeat(rows.query_lens)
        positions += self._iota[: len(positions)]
        return positions

    def slots(
        self, rows: StepRows, computed: StepLengths, positions: I32Array, real: bool
    ) -> Sequence[IntArray]:
        """Slots (T,) of each group, none where it has none; a dummy owns no blocks, so that it may store nothing."""
        if not real:
            return [_NO_SLOTS] * len(self.groups)
        args = positions, rows.query_lens, computed.single_token
        if rows.block_table_rows is None:
            return [
                g.slots(table, None, *args) for g, table in zip(self.groups, rows.block_tables, strict=True)
            ]
        return [
            g.slots(table.ids, rows.block_table_rows, *args)
            for g, table in zip(self.groups, self._tables, strict=True)
        ]

    def slots_of_repeat(self, rows: StepRows, positions: I32Array) -> Sequence[IntArray]:
        """As :meth:`slots`, for rows of one token each that are those of the last call, whose blocks are the same."""
        assert rows.block_table_rows is not None
        return [
            group.slots_of_repeat(table.ids, rows.block_table_rows, positions, rows.query_lens)
            for group, table in zip(self.groups, self._tables, strict=True)
        ]

    def check_blocks(self, rows: StepRows, computed: StepLengths) -> None:
        """Refuse a row whose first or last token has no block: blocks are given in order, so that is all of them."""
        if not len(computed.upper):
            return
        for index, group in enumerate(self.groups):
            if group.group.has_slots:
                ids, where = self._ids_of(index, rows)
                for last in (rows.num_computed_tokens, computed.upper - 1):
                    group.check_block(ids, where, last)

    def _ids_of(self, index: int, rows: StepRows) -> tuple[I32Array, IntArray]:
        """The table of a group, and the row in it of every row of the step."""
        if rows.block_table_rows is None:
            return rows.block_tables[index], self._iota[: len(rows.query_lens)]
        return self._tables[index].ids, rows.block_table_rows


class _GroupValues:
    """Slots and block table of one KV-cache group."""

    def __init__(self, index: int, group: KVCacheGroup, limits: BatchLimits) -> None:
        self.index = index
        self.group = group
        self._block_size = np.array(group.block_size, np.int32)
        self._row_begin: IntArray = np.arange(limits.max_num_reqs, dtype=np.int32) * group.max_blocks
        # Fresh arrays of a long prompt would cost more than their contents: the pages behind them are new each time.
        self._scratch = np.empty((3, limits.max_num_tokens), np.int32)
        self.room = np.empty(limits.max_num_tokens, np.int64)
        """For slots of tokens."""
        # Of the last call with one token a row: what a slot is beyond its position, and where its block ends.
        self._beyond = np.empty(limits.max_num_reqs, np.int64)
        self._end = np.empty(limits.max_num_reqs, np.int32)
        # Column c is in use by rows longer than this.
        starts = np.arange(group.max_blocks, dtype=np.int64) * group.block_size - group.lookahead_tokens
        self._column_start = np.minimum(starts, np.iinfo(np.int32).max).astype(np.int32)

    def width(self, longest: int) -> int:
        """Columns (W) that any row of at most ``longest`` tokens uses."""
        group = self.group
        if not group.has_slots:
            return group.max_blocks
        reach = longest + group.lookahead_tokens + group.block_size - 1
        return min(reach // group.block_size, group.max_blocks)

    def write_table(self, table: I32Array, upper: I32Array, out: I32Array) -> None:
        """Write the block table (R, W) of the real rows to ``out``, with the tail of each row null.

        A table whose owner left ids of a finished request behind the row's last block would otherwise lead
        kernels that walk to a bound into live blocks of others.
        """
        if not self.group.has_slots:
            out[...] = table
            return
        width = out.shape[1]
        used = self._column_start[:width] - upper[:, None]  # negative in columns that the row uses
        used >>= _SIGN  # all bits set there, none elsewhere: a mask without a change of type
        np.bitwise_and(table[:, :width], used, out=out)

    def slots(
        self,
        table: I32Array,
        rows: IntArray | None,
        positions: I32Array,
        query_lens: I32Array,
        single_token: bool,
    ) -> IntArray:
        """Slot (T,) of each real token: its block times ``block_size`` plus its offset; none without slots.

        ``rows`` (R,) are those of the table, None for the leading ones. The result is overwritten by the next call. A
        token whose row lacks the block is refused.
        """
        num_tokens = len(positions)
        if not num_tokens or not self.group.has_slots:
            return self.room[:0]
        column, index, block = self._scratch[:, :num_tokens]
        np.floor_divide(positions, self._block_size, out=column)
        begin = self._row_begin[: len(query_lens)] if rows is None else rows * self.group.max_blocks
        np.add(column, begin if single_token else begin.repeat(query_lens), out=index, casting="same_kind")
        table.take(index, out=block, mode="clip")
        least = block.argmin()
        if block[least] <= NULL_BLOCK:
            token = int((block <= NULL_BLOCK).argmax())
            row = int(query_lens.cumsum().searchsorted(token, "right"))
            raise self._lacking(block[token], positions[token], row)
        block -= column
        slots = self.room[:num_tokens]
        slots[...] = block
        slots *= self._block_size
        if single_token and rows is not None:
            self._beyond[:num_tokens] = slots
            column += _ONE
            np.multiply(column, self._block_size, out=self._end[:num_tokens])
        slots += positions
        return slots

    def slots_of_repeat(
        self, table: I32Array, rows: IntArray, positions: I32Array, query_lens: I32Array
    ) -> IntArray:
        """As :meth:`slots` with one token a row, where the last call was for these rows, which have the same blocks, or
        more.
        """
        num_rows = len(positions)
        if not self.group.has_slots:
            return self.room[:0]
        if np.count_nonzero(positions >= self._end[:num_rows]):
            return self.slots(table, rows, positions, query_lens, single_token=True)
        slots: IntArray = np.add(self._beyond[:num_rows], positions, out=self.room[:num_rows])
        return slots

    def check_block(self, table: I32Array, rows: IntArray, positions: I32Array) -> None:
        """Refuse a position (R,) of a row that lacks the block."""
        columns = np.minimum(positions // self._block_size, self.group.max_blocks - 1)
        block = table[rows, columns]
        row = block.argmin()
        if block[row] <= NULL_BLOCK:
            row = (block <= NULL_BLOCK).argmax()
            raise self._lacking(block[row], positions[row], int(row))

    def _lacking(self, block: int, position: int, row: int) -> ValueError:
        return ValueError(
            f"block_tables: group {self.index} has block {block} for position {position} "
            f"of row {row}, which this step writes; must be above {NULL_BLOCK}"
        )


def dummy_rows(
    shape: BatchShape, groups: tuple[KVCacheGroup, ...], context_len: int, is_prefilling: bool
) -> StepRows:
    """Rows without requests for the real part of ``shape``: equal query lengths, shorter ones first."""
    num_reqs = shape.num_reqs
    query_lens = np.full(num_reqs, shape.num_tokens // max(num_reqs, 1), np.int32)
    if num_reqs:
        query_lens[num_reqs - shape.num_tokens % num_reqs :] += 1
    return StepRows(
        query_lens=query_lens,
        num_computed_tokens=np.full(num_reqs, context_len, np.int32),
        is_prefilling=np.full(num_reqs, is_prefilling, np.bool_),
        token_ids=np.zeros(shape.num_tokens, np.int32),
        block_tables=tuple(np.full((num_reqs, group.max_blocks), NULL_BLOCK, np.int32) for group in groups),
    )
