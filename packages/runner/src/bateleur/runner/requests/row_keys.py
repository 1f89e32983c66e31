"""Names of what running requests fill, by row of the request table."""

# Shape letters: R rows of a step, M rows of the table, N blocks that get a name.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.metadata.native import address
from bateleur.runner.requests.native import kernel
from bateleur.runner.requests.prefix_keys import KEY_BYTES, PrefixKeys, name_blocks_plain


class RowKeys:
    """Keys of the prefixes of all running requests: those of `PrefixKeys`, whose chain each goes on with.

    Of each row only the latest is kept. Where there is a compiler, keys are made in C: `native/names.c`.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32] | None,
        block_size: int,
        *,
        ahead: bool = False,
    ) -> None:
        """Of tables of tokens (M, length) and of the blocks that hold them (M, columns), if any do. `ahead`: blocks are
        called as by `PrefixKeys.blocks_ahead`.
        """
        num_rows, length = token_ids.shape
        self._ids, self._table, self._size, self._ahead = token_ids, block_table, block_size, int(ahead)
        self._latest = np.zeros((num_rows, KEY_BYTES), np.uint8)
        self._num_named = np.zeros(num_rows, np.int32)
        self._behind = np.zeros(num_rows, np.int64)
        self._found: list[bytes] = []
        self._kernel = kernel("name_rows")
        held = (0, 0) if block_table is None else (block_table.ctypes.data, block_table.shape[1])
        tables = (address(token_ids), address(self._latest), address(self._num_named))
        book = (*tables, length, block_size, ahead, *held, 0, 0, 0, address(self._behind))
        self._book = np.array(book, np.int64)
        self._book_address = address(self._book)
        self._make_room(2 * num_rows)

    def _make_room(self, most: int) -> None:
        """For so many names of one step."""
        self._names = np.empty(most, f"V{KEY_BYTES + 4 * self._ahead}")
        self._blocks = np.empty(most, np.int64)
        self._book[8:11] = most, address(self._names), address(self._blocks)

    def begin(self, row: int, keys: PrefixKeys, num_tokens: int) -> None:
        """A row belongs to the request with these keys, of which the first `num_tokens` tokens are cached."""
        self._num_named[row] = count = num_tokens // self._size
        if count:
            self._latest[row] = np.frombuffer(keys.upto(self._ids[row], count)[count - 1], np.uint8)

    def advance(self, rows: NDArray[np.int64], after_R: NDArray[np.int32]) -> tuple[list[int], list[bytes]]:
        """Rows, all different, have `after` tokens in the caches: the N blocks that are full now and were not before,
        and what they are called.
        """
        if self._kernel is None or not len(rows):
            return self._advance_plain(rows, after_R)
        after_R = np.ascontiguousarray(after_R, np.int32)
        args = (self._book_address, address(rows), address(after_R), len(rows))
        count = self._kernel(*args)
        if count > len(self._names):
            self._make_room(2 * count)
            count = self._kernel(*args)
        assert count >= 0, f"row {-1 - count} has tokens that are not in the table"
        self._found = self._names[:count].tolist() if count else []
        return (self._blocks[:count].tolist() if count else []), self._found

    def of(self, index: int, num_tokens: int) -> bytes:
        """The key of the first `num_tokens` tokens of the row of this index in the last call of `advance`, whose last
        block was among the N.
        """
        return self._found[int(self._behind[index]) + num_tokens // self._size - 1][:KEY_BYTES]

    def _advance_plain(
        self, rows: NDArray[np.int64], after_R: NDArray[np.int32]
    ) -> tuple[list[int], list[bytes]]:
        """The same by hashlib."""
        size, ahead, end_R = self._size, self._ahead, after_R // self._size
        names: list[bytes] = []
        blocks: list[int] = []
        for i in (end_R > self._num_named[rows]).nonzero()[0].tolist():
            row, end = int(rows[i]), int(end_R[i])
            ids, first = self._ids[row], int(self._num_named[row])
            assert end * size + ahead <= len(ids), f"row {i} has tokens that are not in the table"
            self._behind[i] = len(names) - first
            keys = name_blocks_plain(ids, first, end, size, self._latest[row].tobytes() if first else b"")
            self._latest[row], self._num_named[row] = np.frombuffer(keys[-1], np.uint8), end
            for block, key in enumerate(keys, first):
                behind = ids[(block + 1) * size : (block + 1) * size + ahead].astype("<i4")
                names.append(key + behind.tobytes())
            if self._table is not None:
                blocks += self._table[row, first:end].tolist()
        self._found = names
        return (blocks if self._table is not None else [0] * len(names)), names
