"""Checks a step and computes the values that it stages, on the host in numpy, without a loop over rows.

Shapes: R real rows (requests), T real tokens. A numpy call costs more than its arithmetic at these sizes. 0-dimensional
arrays and ``argmax`` are faster than Python numbers and ``max``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bateleur.metadata._slot_mapping import SlotMapper
from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import I32Array, IntArray
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_ONE = np.array(1, np.int32)
_NO_SLOTS: IntArray = np.empty(0, np.int64)
_NEGATIVE = 1 << 31  # smallest negative int32, read as uint32


class StepLengths(NamedTuple):
    """Lengths of the requests of a step.

    Attributes:
        num_computed_tokens: (R,) int32, tokens before this step, as written to the device fields.
        seq_lens: (R,) int32, ``num_computed_tokens`` plus the query lengths.
        upper: (R,) int32, upper bounds of ``seq_lens`` on the host.
        longest: largest upper bound, 0 for no rows.
        starts: (R + 1,) int32, index of each request's first token, and the token count.
        single_token: every request has one token.
    """

    num_computed_tokens: I32Array
    seq_lens: I32Array
    upper: I32Array
    longest: int
    starts: I32Array
    single_token: bool


class StepValues:
    """Checks steps against ``limits`` and ``groups`` and computes the staged values. Holds no state between steps."""

    def __init__(
        self, limits: BatchLimits, groups: tuple[KVCacheGroup, ...], tables: tuple[BlockTable, ...] = ()
    ) -> None:
        self.limits = limits
        self._tables = tables
        self._table_rows = len(tables[0].ids) if tables else 0
        self.groups = [SlotMapper(index, group, limits) for index, group in enumerate(groups)]
        self._iota: I32Array = np.arange(max(limits.max_num_tokens, limits.max_num_reqs) + 1, dtype=np.int32)
        self._ones = np.ones(limits.max_num_reqs, np.int32).tobytes()
        self._groups = groups

    def check_sizes(self, rows: StepRows, shape: BatchShape) -> None:
        """Raise ValueError if the sizes of a step do not fit the buffers or each other."""
        limits = self.limits
        if shape.padded_reqs > limits.max_num_reqs:
            raise ValueError(f"padded_reqs: {shape.padded_reqs} is above max_num_reqs {limits.max_num_reqs}")
        if shape.padded_tokens > limits.max_num_tokens:
            raise ValueError(f"padded_tokens: {shape.padded_tokens} is above max_num_tokens {limits.max_num_tokens}")
        rows.check_arrays(shape.num_reqs, shape.num_tokens, self._groups, self._table_rows)

    def one_token_each(self, rows: StepRows, shape: BatchShape) -> bool:
        """Return whether every request has exactly one token."""
        ones = rows.query_lens.tobytes() == self._ones[: 4 * shape.num_reqs]
        return ones and shape.num_tokens == shape.num_reqs

    def starts(self, rows: StepRows, shape: BatchShape, single_token: bool) -> I32Array:
        """Return index of each request's first token, and the token count: (R + 1,) int32.

        Raises:
            ValueError: the query lengths do not fit the shape.
        """
        if single_token:
            return self._iota[: shape.num_reqs + 1]
        query_lens = rows.query_lens
        starts = np.zeros(shape.num_reqs + 1, np.int32)
        query_lens.cumsum(out=starts[1:])
        if starts[-1] != shape.num_tokens:
            raise ValueError(f"query_lens: sum to {query_lens.sum()}, but the shape has num_tokens {shape.num_tokens}")
        if shape.num_reqs:
            shortest, longest = query_lens.argmin(), query_lens.argmax()
            if query_lens[shortest] < 1:
                raise ValueError(f"query_lens: {query_lens[shortest]} in row {shortest}; must be at least 1")
            if query_lens[longest] > shape.max_query_len:
                raise ValueError(
                    f"query_lens: {query_lens[longest]} is above the promised max_query_len {shape.max_query_len}"
                )
        return starts

    def lengths(self, rows: StepRows, shape: BatchShape, on_host: bool) -> StepLengths:
        """Return the checked lengths of a step. ``on_host``: read counts in device tensors too, on a CPU."""
        single_token = self.one_token_each(rows, shape)
        starts = self.starts(rows, shape, single_token)
        upper, longest = self._lengths(rows, single_token)
        if rows.num_computed_tokens_device is None or not on_host:
            return StepLengths(rows.num_computed_tokens, upper, upper, longest, starts, single_token)
        before = rows.num_computed_tokens_device.numpy().astype(np.int32)
        return StepLengths(before, before + rows.query_lens, upper, longest, starts, single_token)

    def lengths_of_next_step(self, rows: StepRows, shape: BatchShape, last: StepLengths) -> StepLengths:
        """Return the lengths of a step made by :meth:`StepRows.next_step`. ``last``: lengths of the step before."""
        rows.check_next_step(shape.num_reqs, shape.num_tokens)
        upper, longest = self._lengths(rows, last.single_token)
        return StepLengths(rows.num_computed_tokens, upper, upper, longest, last.starts, last.single_token)

    def _lengths(self, rows: StepRows, single_token: bool) -> tuple[I32Array, int]:
        """Return upper bounds (R,) of the sequence lengths including this step, and the largest one (0 for no rows)."""
        computed = rows.num_computed_tokens
        if not len(computed):
            return computed, 0
        unsigned = computed.view(np.uint32)
        top = unsigned.argmax()
        if unsigned[top] >= _NEGATIVE:
            raise ValueError(f"num_computed_tokens: {computed[top]} in row {top}; must not be negative")
        upper = computed + (_ONE if single_token else rows.query_lens)
        if not single_token and computed[top] <= self.limits.max_model_len:  # above it, the int32 sum may have wrapped
            top = upper.argmax()
        longest = int(computed[top]) + int(rows.query_lens[top])
        if longest > self.limits.max_model_len:
            raise ValueError(
                f"num_computed_tokens: row {top} would hold {longest} tokens, "
                f"above max_model_len {self.limits.max_model_len}"
            )
        return upper, longest

    def positions(self, rows: StepRows, lengths: StepLengths) -> I32Array:
        """Return the position (T,) of each token."""
        if lengths.single_token:
            return lengths.num_computed_tokens
        positions = (lengths.num_computed_tokens - lengths.starts[:-1]).repeat(rows.query_lens)
        positions += self._iota[: len(positions)]
        return positions

    def slots(self, rows: StepRows, lengths: StepLengths, positions: I32Array, real: bool) -> Sequence[IntArray]:
        """Return the slot mapping (T,) of each group, empty for groups without slots and for dummy batches."""
        if not real:
            return [_NO_SLOTS] * len(self.groups)
        args = positions, rows.query_lens, lengths.single_token
        if rows.block_table_rows is None:
            return [g.slots(table, None, *args) for g, table in zip(self.groups, rows.block_tables, strict=True)]
        return [
            g.slots(table.ids, rows.block_table_rows, *args) for g, table in zip(self.groups, self._tables, strict=True)
        ]

    def slots_of_next_step(self, rows: StepRows, positions: I32Array) -> Sequence[IntArray]:
        """Return the slot mappings of a step of one token per request, with the requests of the last call."""
        assert rows.block_table_rows is not None
        return [
            group.slots_of_next_step(table.ids, rows.block_table_rows, positions, rows.query_lens)
            for group, table in zip(self.groups, self._tables, strict=True)
        ]

    def check_blocks(self, rows: StepRows, lengths: StepLengths) -> None:
        """Raise ValueError if the first or last token of a request has no KV block. Blocks are allocated in order."""
        if not len(lengths.upper):
            return
        for index, group in enumerate(self.groups):
            if group.group.has_slots:
                ids, where = self._ids_of(index, rows)
                for last in (rows.num_computed_tokens, lengths.upper - 1):
                    group.check_block(ids, where, last)

    def _ids_of(self, index: int, rows: StepRows) -> tuple[I32Array, IntArray]:
        """Return the block table of a group, and the table row of each row of the step."""
        if rows.block_table_rows is None:
            return rows.block_tables[index], self._iota[: len(rows.query_lens)]
        return self._tables[index].ids, rows.block_table_rows


def dummy_rows(shape: BatchShape, groups: tuple[KVCacheGroup, ...], context_len: int, is_prefilling: bool) -> StepRows:
    """Return dummy rows of ``shape``, without requests: query lengths differ by at most 1, shorter ones first."""
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
