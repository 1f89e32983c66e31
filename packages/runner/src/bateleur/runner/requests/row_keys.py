"""Prefix-cache keys of the blocks that running requests fill, by row of the request table."""

# Shape letters: R rows of a step, M rows of the table, N blocks that get a key.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.prefix_keys import KEY_BYTES, PrefixKeys, block_keys


class RowKeys:
    """Block hashes (prefix-cache keys) of running requests. Each row stores the last key of its chain."""

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        block_table: NDArray[np.int32] | None,
        block_size: int,
        *,
        lookahead: bool = False,
    ) -> None:
        """Keep references to the tables of all rows.

        Args:
            token_ids: (rows, length) tokens of each row.
            block_table: (rows, columns) KV blocks of each row; None without attention.
            block_size: tokens of a block.
            lookahead: whether a block's key includes the token after it (`PrefixKeys.blocks_with_lookahead`).
        """
        self._ids, self._table, self._size, self._lookahead = token_ids, block_table, block_size, int(lookahead)
        self._latest = np.zeros((len(token_ids), KEY_BYTES), np.uint8)
        self._num_keys = np.zeros(len(token_ids), np.int32)
        self._roots = [b""] * len(token_ids)
        self._behind: dict[int, int] = {}
        self._found: list[bytes] = []

    def begin(self, row: int, keys: PrefixKeys, num_tokens: int) -> None:
        """Prepare a row for a request with these keys, whose first `num_tokens` tokens are a prefix-cache hit."""
        self._num_keys[row] = count = num_tokens // self._size
        self._roots[row] = keys.root
        if count:
            self._latest[row] = np.frombuffer(keys.upto(self._ids[row], count)[count - 1], np.uint8)

    def advance(self, rows: NDArray[np.int64], after_R: NDArray[np.int32]) -> tuple[list[int], list[bytes]]:
        """Return the blocks that became full in a step, and their keys.

        rows: (R,) distinct table rows. after_R: (R,) computed tokens of these requests after the step.
        """
        size, lookahead, end_R = self._size, self._lookahead, after_R // self._size
        names: list[bytes] = []
        blocks: list[int] = []
        self._behind.clear()
        for i in (end_R > self._num_keys[rows]).nonzero()[0].tolist():
            row, end = int(rows[i]), int(end_R[i])
            ids, first = self._ids[row], int(self._num_keys[row])
            assert end * size + lookahead <= len(ids), f"row {i} has tokens that are not in the table"
            self._behind[i] = len(names) - first
            before = self._latest[row].tobytes() if first else self._roots[row]
            keys = block_keys(ids, first, end, size, before)
            self._latest[row], self._num_keys[row] = np.frombuffer(keys[-1], np.uint8), end
            for block, key in enumerate(keys, first):
                following = ids[(block + 1) * size : (block + 1) * size + lookahead].astype("<i4")
                names.append(key + following.tobytes())
            blocks += [0] * len(keys) if self._table is None else self._table[row, first:end].tolist()
        self._found = names
        return blocks, names

    def of(self, index: int, num_tokens: int) -> bytes:
        """Return the key of the first `num_tokens` tokens, whose last block the latest call of `advance` returned.

        index: index of the request in the argument `rows` of that call.
        """
        return self._found[self._behind[index] + num_tokens // self._size - 1][:KEY_BYTES]
