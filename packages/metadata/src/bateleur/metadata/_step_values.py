"""Checks a step and computes the values that it stages, on the host in numpy, without a loop over requests.

Shapes: R real requests. A numpy call costs more than its arithmetic at these sizes. 0-dimensional arrays and ``argmax``
are faster than Python numbers and ``max``.
"""

from typing import NamedTuple

import numpy as np

from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.common_attention_metadata import BatchShape
from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import I32Array, IntArray
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup, StepRows

_ONE = np.array(1, np.int32)
_NEGATIVE = 1 << 31  # smallest negative int32, read as uint32


class StepLengths(NamedTuple):
    """Lengths of the requests of a step.

    Attributes:
        upper: (R,) int32, upper bounds of the sequence lengths after the step.
        longest: largest upper bound, 0 for no rows.
        starts: (R + 1,) int32, index of each row's first token, and the token count.
    """

    upper: I32Array
    longest: int
    starts: I32Array


class StepValues:
    """Checks steps against ``limits`` and ``groups`` and computes the staged values. Holds no state between steps."""

    def __init__(
        self, limits: BatchLimits, groups: tuple[KVCacheGroup, ...], tables: tuple[BlockTable, ...] = ()
    ) -> None:
        self.limits, self.groups = limits, groups
        self._tables = tables
        self._table_rows = len(tables[0].ids) if tables else 0
        self._iota: I32Array = np.arange(max(limits.max_num_tokens, limits.max_num_reqs) + 1, dtype=np.int32)
        self._ones = np.ones(limits.max_num_reqs, np.int32).tobytes()
        # By group: a row uses column c of the block table if it is longer than entry c.
        self._column_starts = [
            np.arange(group.max_blocks, dtype=np.int64) * group.block_size - group.lookahead_tokens for group in groups
        ]

    def check_sizes(self, rows: StepRows, shape: BatchShape) -> None:
        """Raise ValueError if the sizes of a step do not fit the buffers or each other."""
        limits = self.limits
        if shape.padded_reqs > limits.max_num_reqs:
            raise ValueError(f"padded_reqs: {shape.padded_reqs} is above max_num_reqs {limits.max_num_reqs}")
        if shape.padded_tokens > limits.max_num_tokens:
            raise ValueError(f"padded_tokens: {shape.padded_tokens} is above max_num_tokens {limits.max_num_tokens}")
        rows.check_arrays(shape.num_reqs, shape.num_tokens, self.groups, self._table_rows)

    def lengths(self, rows: StepRows, shape: BatchShape) -> StepLengths:
        """Check the lengths of a step and return them. Raises ValueError if one breaks a limit."""
        ones = rows.query_lens.tobytes() == self._ones[: 4 * shape.num_reqs]
        single_token = ones and shape.num_tokens == shape.num_reqs
        starts = self._iota[: shape.num_reqs + 1] if single_token else self._starts(rows, shape)
        return StepLengths(*self._bounds(rows, single_token), starts)

    def _starts(self, rows: StepRows, shape: BatchShape) -> I32Array:
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

    def _bounds(self, rows: StepRows, single_token: bool) -> tuple[I32Array, int]:
        """Return upper bounds (R,) of the sequence lengths after the step, and the largest one (0 for an empty step).

        single_token: whether every request has one token in this step.
        """
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

    def check_blocks(self, rows: StepRows, lengths: StepLengths) -> None:
        """Raise ValueError if the first or last token of a request has no KV block. Blocks are allocated in order."""
        if not len(lengths.upper):
            return
        for index, group in enumerate(self.groups):
            if group.has_slots:
                table, where = self._table_of(index, rows)
                for positions in (rows.num_computed_tokens, lengths.upper - 1):
                    block = table[where, np.minimum(positions // group.block_size, group.max_blocks - 1)]
                    row = int((block <= NULL_BLOCK).argmax())
                    if block[row] <= NULL_BLOCK:
                        raise ValueError(
                            f"block_tables: group {index} has block {block[row]} for position {positions[row]} of row "
                            f"{row}, which this step writes; must be above {NULL_BLOCK}"
                        )

    def _table_of(self, index: int, rows: StepRows) -> tuple[I32Array, IntArray]:
        """Return the block table of a KV-cache group, and the row of each request of the step in it."""
        if rows.block_table_rows is None:
            return rows.block_tables[index], self._iota[: len(rows.query_lens)]
        return self._tables[index].ids, rows.block_table_rows

    def used_table(self, index: int, table: I32Array, lengths: StepLengths) -> I32Array:
        """Copy the leading columns of a group's block table ``table`` that this step may use: (R, columns).

        Columns after each row's last block become the null block. Kernels may read up to a bound, and stale ids there
        would make them read blocks of other requests. Without slots the table is copied unchanged.
        """
        group = self.groups[index]
        if not group.has_slots:
            return table.copy()
        width = min(-(-(lengths.longest + group.lookahead_tokens) // group.block_size), group.max_blocks)
        return np.where(self._column_starts[index][:width] < lengths.upper[:, None], table[:, :width], NULL_BLOCK)


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
