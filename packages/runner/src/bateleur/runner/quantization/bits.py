"""Packing and unpacking of 4-bit and 8-bit codes in 32-bit words."""

from collections.abc import Sequence

import torch
from torch import Tensor

PLAIN = tuple(range(8))
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""`order` of AWQ's columns for `unpack_columns`."""


def unpack_columns(words: Tensor, bits: int, order: Sequence[int] = PLAIN) -> Tensor:
    """Unpack words (R, C) int32 to codes (R, C * 32 / bits) uint8.

    order: for 4 bits, column i of 8 adjacent ones is nibble order[i] of their word. Nibble 0 has the lowest bits.
    """
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    nibbles = torch.stack([codes & 15, codes >> 4], -1).view(len(words), -1, 8)
    return (nibbles if tuple(order) == PLAIN else nibbles[..., list(order)]).flatten(1)


def unpack_rows(words: Tensor, bits: int, rows: int) -> Tensor:
    """Unpack words (..., R, C) int32, each with codes of adjacent rows, to codes (..., rows, C) uint8."""
    *lead, count, columns = words.shape
    codes = unpack_columns(words.transpose(-1, -2).reshape(-1, count), bits)
    return codes.view(*lead, columns, -1).transpose(-1, -2)[..., :rows, :].contiguous()


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes (N, K) to bytes (N, K / 2) with even columns in the low bits. A last odd column is paired with 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def signed(codes: Tensor) -> Tensor:
    """Return unsigned 8-bit codes less 128, as int8."""
    return codes.bitwise_xor(0x80).view(torch.int8)


def group_table(index: Tensor, group: int) -> Tensor | None:
    """Return `index` (K,) int32, the scale group of each column; None if groups are `group` consecutive columns."""
    consecutive = torch.arange(index.numel(), dtype=index.dtype) // group
    return None if torch.equal(index, consecutive) else index
