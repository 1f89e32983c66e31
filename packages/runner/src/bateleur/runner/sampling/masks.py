"""Bit masks of allowed tokens."""

# Shape letters: S rows of logits, V vocabulary, W words of 32 bits, ceil(V / 32) of them.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS_OF_A_BYTE = 8


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def words_of(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return a bit mask of these tokens, each in [0, vocab_size): `mask_words` words, see `forbid_`."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def forbid_(logits_SV: Tensor, allowed_SW: Tensor, first: int = 0) -> None:
    """Set logits to -inf, in place, for tokens without a bit in `allowed_SW`, even if they are NaN.

    logits_SV: S rows of logits for the tokens from `first` on. allowed_SW: (S, words) int32 on the same device, bits of
    the whole vocabulary: token t is bit t % 32, counted from the lowest, of word t // 32.
    """
    num_tokens = logits_SV.shape[1]
    # Bytes take a quarter of the memory of words below.
    bytes_SB = allowed_SW.contiguous().view(torch.uint8)[:, first // 8 : -(-(first + num_tokens) // 8)]
    bit_8 = 1 << torch.arange(_BITS_OF_A_BYTE, dtype=torch.uint8, device=logits_SV.device)
    allowed_SV = bytes_SB.unsqueeze(2).bitwise_and(bit_8).flatten(1)[:, first % 8 :][:, :num_tokens]
    logits_SV.masked_fill_(allowed_SV == 0, -torch.inf)
