"""Codes of 4 and 8 bits in words of 32, as integer formats store them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PLAIN = tuple(range(8))
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word AWQ has each of 8 columns."""


def unpack_columns(words: Tensor, bits: int, order: Sequence[int] = PLAIN) -> Tensor:
    """(R, C * 32 / bits) uint8 of words (R, C) int32, each of which holds codes of neighbours in a row.

    order: for codes of 4 bits, where in a word each of 8 neighbours lies, low bits first.
    """
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    nibbles = torch.stack([codes & 15, codes >> 4], -1).view(len(words), -1, 8)
    return (nibbles if tuple(order) == PLAIN else nibbles[..., list(order)]).flatten(1)


def unpack_rows(words: Tensor, bits: int, rows: int) -> Tensor:
    """(..., rows, C) uint8 of words (..., R, C) int32, each of which holds codes of neighbours in a column."""
    *lead, count, columns = words.shape
    codes = unpack_columns(words.transpose(-1, -2).reshape(-1, count), bits)
    return codes.view(*lead, columns, -1).transpose(-1, -2)[..., :rows, :].contiguous()


def pack_nibbles(codes: Tensor) -> Tensor:
    """(N, K / 2) uint8 of codes (N, K): the even column in the low bits. An odd last column is paired with 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4
