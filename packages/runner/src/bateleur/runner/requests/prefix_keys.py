"""What a prefix of tokens is called: one chain of keys for all caches of a model."""

from __future__ import annotations

from hashlib import blake2b

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

    def of(self, token_ids: NDArray[np.int32], num_tokens: int) -> bytes:
        """The key of the first `num_tokens` of `token_ids`, a positive multiple of the block size.

        Tokens of prefixes that were asked for before must not have changed.
        """
        index, rest = divmod(num_tokens, self.block_size)
        assert index > 0
        assert rest == 0
        keys = self._keys
        if len(keys) < index:
            tokens = np.ascontiguousarray(token_ids[len(keys) * self.block_size : num_tokens]).tobytes()
            width = len(tokens) // (index - len(keys))
            key = keys[-1] if keys else b""
            for first in range(0, len(tokens), width):
                key = blake2b(key + tokens[first : first + width], digest_size=_KEY_BYTES).digest()
                keys.append(key)
        return keys[index - 1]

    def ahead(self, token_ids: NDArray[np.int32], num_tokens: int) -> bytes:
        """As `of`, for contents that depend on the next token as well, which must be known.

        A drafter's keys and values are such: what it stores at a position is made from the token after it (RFC #50438
        of vLLM). Only in the last block of a prefix does it make a difference, so a hit is lost only where another
        token follows.
        """
        token = int(token_ids[num_tokens]).to_bytes(4, "little")
        return blake2b(self.of(token_ids, num_tokens) + token, digest_size=_KEY_BYTES).digest()
