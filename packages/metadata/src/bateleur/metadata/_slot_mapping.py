"""Slot mapping and block table of one KV-cache group, computed on the host."""

import numpy as np

from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import I32Array, IntArray
from bateleur.metadata.step_inputs import BatchLimits, KVCacheGroup

_ONE = np.array(1, np.int32)
_SIGN = np.array(31, np.int32)


class SlotMapper:
    """Computes slot mapping and block table of one KV-cache group. Shapes: R requests, T tokens, W used columns."""

    def __init__(self, index: int, group: KVCacheGroup, limits: BatchLimits) -> None:
        self.index = index
        self.group = group
        self._block_size = np.array(group.block_size, np.int32)
        self._row_begin: IntArray = np.arange(limits.max_num_reqs, dtype=np.int32) * group.max_blocks
        # Reused, because new memory for a long prompt costs more page faults than the computation takes.
        self._scratch = np.empty((3, limits.max_num_tokens), np.int32)
        self._slots = np.empty(limits.max_num_tokens, np.int64)
        # Last call with one token a row: slot minus position, and first position after the block, of each row.
        self._slot_minus_position = np.empty(limits.max_num_reqs, np.int64)
        self._block_end = np.empty(limits.max_num_reqs, np.int32)
        # A row uses column c if it is longer than entry c.
        starts = np.arange(group.max_blocks, dtype=np.int64) * group.block_size - group.lookahead_tokens
        self._column_start = np.minimum(starts, np.iinfo(np.int32).max).astype(np.int32)

    def width(self, longest: int) -> int:
        """Return the number of columns (W) that a request of ``longest`` tokens may use."""
        group = self.group
        if not group.has_slots:
            return group.max_blocks
        reach = longest + group.lookahead_tokens + group.block_size - 1
        return min(reach // group.block_size, group.max_blocks)

    def write_table(self, table: I32Array, upper: I32Array, out: I32Array) -> None:
        """Write the block table (R, W) to ``out``. Columns after each row's last block become the null block.

        Kernels may read up to an upper bound of the length. Stale ids would make them read blocks of other requests.
        """
        if not self.group.has_slots:
            out[...] = table
            return
        width = out.shape[1]
        used = self._column_start[:width] - upper[:, None]  # negative in used columns
        used >>= _SIGN  # all bits set in used columns, none elsewhere
        np.bitwise_and(table[:, :width], used, out=out)

    def slots(
        self, table: I32Array, rows: IntArray | None, positions: I32Array, query_lens: I32Array, single_token: bool
    ) -> IntArray:
        """Return the slot (T,) int64 of each token: ``block id * block_size + offset``. Empty for a group without
        slots.

        ``rows`` (R,) are rows of ``table``; None means the first R. The next call overwrites the result.

        Raises:
            ValueError: a token has no block.
        """
        num_tokens = len(positions)
        if not num_tokens or not self.group.has_slots:
            return self._slots[:0]
        column, index, block = self._scratch[:, :num_tokens]
        np.floor_divide(positions, self._block_size, out=column)
        begin = self._row_begin[: len(query_lens)] if rows is None else rows * self.group.max_blocks
        np.add(column, begin if single_token else begin.repeat(query_lens), out=index, casting="same_kind")
        table.take(index, out=block, mode="clip")
        least = block.argmin()
        if block[least] <= NULL_BLOCK:
            token = int((block <= NULL_BLOCK).argmax())
            row = int(query_lens.cumsum().searchsorted(token, "right"))
            raise self._missing_block(block[token], positions[token], row)
        block -= column
        slots = self._slots[:num_tokens]
        slots[...] = block
        slots *= self._block_size
        if single_token and rows is not None:
            self._slot_minus_position[:num_tokens] = slots
            column += _ONE
            np.multiply(column, self._block_size, out=self._block_end[:num_tokens])
        slots += positions
        return slots

    def slots_of_next_step(
        self, table: I32Array, rows: IntArray, positions: I32Array, query_lens: I32Array
    ) -> IntArray:
        """Return the slot (T,) int64 of each token of the next step, if only blocks were appended since the last call.

        The step has one token per request, and the same requests as the last call. Only a request that enters a new
        block is looked up in the table.
        """
        num_rows = len(positions)
        if not self.group.has_slots:
            return self._slots[:0]
        if np.count_nonzero(positions >= self._block_end[:num_rows]):
            return self.slots(table, rows, positions, query_lens, single_token=True)
        slots: IntArray = np.add(self._slot_minus_position[:num_rows], positions, out=self._slots[:num_rows])
        return slots

    def check_block(self, table: I32Array, rows: IntArray, positions: I32Array) -> None:
        """Raise ValueError if a request has no block for its position in ``positions`` (R,)."""
        columns = np.minimum(positions // self._block_size, self.group.max_blocks - 1)
        block = table[rows, columns]
        row = block.argmin()
        if block[row] <= NULL_BLOCK:
            row = (block <= NULL_BLOCK).argmax()
            raise self._missing_block(block[row], positions[row], int(row))

    def _missing_block(self, block: int, position: int, row: int) -> ValueError:
        return ValueError(
            f"block_tables: group {self.index} has block {block} for position {position} "
            f"of row {row}, which this step writes; must be above {NULL_BLOCK}"
        )
