"""What a prefix of tokens is called: one chain of keys for all caches of a model."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bateleur.metadata.native import address
from bateleur.runner.requests.native import kernel

_KEY_BYTES = 16


class PrefixKeys:
    """Keys of the prefixes of one request that end at multiples of `block_size` tokens.

    A key covers every token before it, not only those of its block: equal keys mean equal prefixes (128 bits; a
    collision by chance is out of reach, and keys never leave the process).
    """

    __slots__ = ("_keys", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys: list[bytes] = []

    def of(self, token_ids: NDArray[np.int32], num_tokens: int) -> bytes:
        """The key of the first `num_tokens` of `token_ids`, a positive multiple of the block size.

        Tokens of prefixes that were asked for before must not have changed.
        """
        index, rest = divmod(num_tokens, self.block_size)
        assert index > 0
        assert rest == 0
        return self._upto(token_ids, index)[index - 1]

    def blocks(self, token_ids: NDArray[np.int32], first: int, end: int) -> list[bytes]:
        """Of the blocks `first` to `end - 1`, the keys of the prefixes that end with them."""
        return self._upto(token_ids, end)[first:end]

    def blocks_ahead(self, token_ids: NDArray[np.int32], first: int, end: int) -> list[bytes]:
        """As `blocks`, for contents that depend on the next token as well, which must be known.

        A drafter's keys and values are such: what it stores at a position is made from the token after it (RFC #50438
        of vLLM). Only in the last block of a prefix does it make a difference, so a hit is lost only where another
        token follows.
        """
        size = self.block_size
        behind = token_ids[(first + 1) * size : end * size + 1 : size].astype("<i4").tobytes()
        keys = self._upto(token_ids, end)[first:end]
        assert len(behind) == 4 * len(keys)
        return [key + behind[4 * i : 4 * i + 4] for i, key in enumerate(keys)]

    def _upto(self, token_ids: NDArray[np.int32], end: int) -> list[bytes]:
        """Keys by block, for at least `end` blocks."""
        keys = self._keys
        if (first := len(keys)) < end:
            ids = np.ascontiguousarray(token_ids[: end * self.block_size], np.int32)
            row = RowKeys(ids[None], self.block_size)
            row.begin(0, self, only_last=True)
            _, names = row.names(np.zeros(1, np.int64), np.array([first]), np.array([end]), 1, ahead=False)
            keys += names
        return keys


class RowKeys:
    """Keys of the prefixes of all running requests, by row: those of `PrefixKeys`, whose chain each goes on with.

    Where there is a compiler, they are made in C: `native/names.c`.
    """

    def __init__(self, token_ids: NDArray[np.int32], block_size: int) -> None:
        """Of a table of tokens (M, length)."""
        self._ids, self._size = token_ids, block_size
        num_rows, length = token_ids.shape
        self._keys = np.zeros((num_rows, length // block_size, _KEY_BYTES), np.uint8)
        self._bytes = self._keys.reshape(-1).data
        self._num_keys = np.zeros(num_rows, np.int32)
        self._name_rows = kernel("name_rows")

    def begin(self, row: int, chain: PrefixKeys, *, only_last: bool = False) -> None:
        """A row belongs to the request with this chain."""
        self._num_keys[row] = count = len(chain._keys)
        first = count - 1 if only_last and count else 0
        known = np.frombuffer(b"".join(chain._keys[first:]), np.uint8)
        self._keys[row, first:count] = known.reshape(-1, _KEY_BYTES)

    def of(self, row: int, num_tokens: int) -> bytes:
        """The key of the first `num_tokens` tokens of a row, which it was asked for by a block."""
        at = (row * self._keys.shape[1] + num_tokens // self._size - 1) * _KEY_BYTES
        return bytes(self._bytes[at : at + _KEY_BYTES])

    def names(
        self,
        rows: NDArray[np.int64],
        first_R: NDArray[np.integer[Any]],
        end_R: NDArray[np.integer[Any]],
        width: int,
        *,
        ahead: bool,
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """What the blocks `first` to `end` - 1 of each of R rows are called, N altogether; and (N,) their entries in a
        flat table of blocks of `width` columns. `ahead`: as in `PrefixKeys.blocks_ahead`.
        """
        if self._name_rows is None:
            return self._names_plain(rows, first_R, end_R, width, ahead)
        count, bytes_each = int(end_R.sum() - first_R.sum()), _KEY_BYTES + 4 * ahead
        first_R, end_R = first_R.astype(np.int32), end_R.astype(np.int32)
        cells, names = np.empty(1 + count, np.int64), np.empty((1 + count, bytes_each), np.uint8)
        done = self._name_rows(
            self._ids.ctypes.data, self._ids.shape[1], address(rows), address(first_R), address(end_R), len(rows),
            self._size, ahead, address(self._keys), self._keys.shape[1], address(self._num_keys), width,
            address(cells), address(names),
        )  # fmt: skip
        assert done == count, "blocks are full, and have a token behind them"
        packed = names.tobytes()
        return cells[:count], [
            packed[at : at + bytes_each] for at in range(0, count * bytes_each, bytes_each)
        ]

    def _names_plain(
        self,
        rows: NDArray[np.int64],
        first_R: NDArray[np.integer[Any]],
        end_R: NDArray[np.integer[Any]],
        width: int,
        ahead: bool,
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """The same by hashlib."""
        cells, names, size = [], [], self._size
        for row, first, end in zip(rows.tolist(), first_R.tolist(), end_R.tolist(), strict=True):
            ids, keys = self._ids[row], self._keys[row]
            assert end * size + (first < end and ahead) <= len(ids), (
                "blocks are full, and have a token behind them"
            )
            for block in range(self._num_keys[row], end):
                key = keys[block - 1].tobytes() if block else b""
                key += ids[block * size : (block + 1) * size].tobytes()
                keys[block] = np.frombuffer(blake2b(key, digest_size=_KEY_BYTES).digest(), np.uint8)
            self._num_keys[row] = max(end, self._num_keys[row])
            for block in range(first, end):
                behind = ids[(block + 1) * size : (block + 1) * size + ahead]
                cells.append(row * width + block)
                names.append(keys[block].tobytes() + behind.tobytes())
        return np.array(cells, np.int64), names
