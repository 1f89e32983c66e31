"""What a prefix of tokens is called: one chain of keys for all caches of a model."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def known(self, num_tokens: int) -> bytes | None:
        """The key of the first `num_tokens` tokens, if it was made before."""
        index = num_tokens // self.block_size - 1
        return self._keys[index] if index < len(self._keys) else None

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
        if len(keys) < end:
            tokens = token_ids[len(keys) * self.block_size : end * self.block_size].tobytes()
            width = len(tokens) // (end - len(keys))
            key = keys[-1] if keys else b""
            for first in range(0, len(tokens), width):
                key = blake2b(key + tokens[first : first + width], digest_size=_KEY_BYTES).digest()
                keys.append(key)
        return keys


def names_of(
    chains: Sequence[PrefixKeys],
    token_ids: NDArray[np.int32],
    rows: NDArray[np.int64],
    blocks: NDArray[np.integer[Any]],
    *,
    ahead: bool,
) -> list[bytes]:
    """What N blocks are called, each of the request with these keys, whose tokens are a row of `token_ids` (M, length).

    rows, blocks: (N,); blocks of one request come in order. ahead: as in `PrefixKeys.blocks_ahead`.
    """
    size, length = chains[0].block_size, token_ids.shape[1]
    flat, begins = token_ids.reshape(-1), rows * length + blocks * size
    tokens = flat.take(begins[:, None] + np.arange(size)).tobytes()
    width, at, names = len(tokens) // len(chains), 0, []
    for i, (chain, block) in enumerate(zip(chains, blocks.tolist(), strict=True)):
        keys = chain._keys
        if len(keys) == block:
            last = keys[-1] if keys else b""
            keys.append(blake2b(last + tokens[at : at + width], digest_size=_KEY_BYTES).digest())
        elif len(keys) < block:
            chain._upto(token_ids[rows[i]], block + 1)
        names.append(keys[block])
        at += width
    if not ahead:
        return names
    behind = flat[begins + size].astype("<i4").tobytes()
    return [name + behind[4 * i : 4 * i + 4] for i, name in enumerate(names)]
