"""Products of float32 tokens with matrices of eight bits, on a CPU that multiplies bytes: see `coarse.c`.

Shapes: T tokens, N rows of a matrix, K columns, K4 of them up to a whole number of fours; P panels of WIDTH rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bateleur.metadata.native import Kernel, entry, kernels, missing
from bateleur.metadata.native.huge_pages import HugePages
from bateleur.runner.models.native import as_operator

_MOST = 127
_MOST_COLUMNS = (2**31 - 1) // (255 * _MOST)  # whose sums, of bytes with 128 added, an int32 holds
_LEAST = 2.0**-126  # a scale that numbers can be divided by
_AT_ONCE = 64  # panels that are rounded at once: a published head's largest matrix has 2 GB in float32
_SHARES = (4, 4)  # bytes of a row before its numbers: where its sum begins, and its scale
_memory = HugePages()


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps matrices of a model in that dtype on that device from being multiplied in eight bits, or None."""
    if device.type != "cpu":
        return f"on {device.type} there are no products of eight bits"
    if dtype != torch.float32:
        return f"products of eight bits take tokens in float32, not in {str(dtype).removeprefix('torch.')}"
    if (reason := missing()) is not None:
        return reason
    return None if _width() else "this processor has no products of bytes (AVX-512 VNNI or AVX-VNNI)"


def packs(weight: Tensor) -> bool:
    """Whether there is a kernel for products with W (N, K)."""
    if not 0 < weight.shape[1] <= _MOST_COLUMNS or not weight.shape[0]:
        return False
    return why_not(weight.device, weight.dtype) is None


def pack(weight: Tensor) -> Tensor:
    """W (N, K) float32, finite, as the kernel reads it: (P, WIDTH * (8 + K4)) int8.

    Each row is rounded to whole numbers of -127 to 127 times a scale of its own, to the nearest, ties to even.
    """
    (rows, columns), width = weight.shape, _width()
    panels, padded = -(-rows // width), -(-columns // 4) * 4
    packed = _memory.empty(panels, width * (sum(_SHARES) + padded), dtype=torch.int8)
    for part, to in zip(weight.split(_AT_ONCE * width), packed.split(_AT_ONCE), strict=True):
        _pack_into(to, part)
    return packed


def _pack_into(packed: Tensor, weight: Tensor) -> None:
    (rows, columns), width, panels = weight.shape, _width(), len(packed)
    padded = packed.shape[1] // width - sum(_SHARES)
    scale = weight.new_zeros(panels * width)
    scale[:rows] = (weight.abs().amax(1) / _MOST).clamp_min(_LEAST)
    whole = torch.zeros(panels * width, padded, dtype=torch.int8)
    whole[:rows, :columns] = (weight / scale[:rows, None]).round().clamp(-_MOST, _MOST)
    begins = -128 * whole.sum(1, dtype=torch.int32)
    first, second, rest = packed.split([width * each for each in (*_SHARES, padded)], 1)
    first.copy_(begins.view(panels, width).view(torch.int8))
    second.copy_(scale.view(panels, width).view(torch.int8))
    rest.copy_(whole.view(panels, width, padded // 4, 4).transpose(1, 2).reshape(panels, -1))


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """W (N, K) float32 as it was rounded."""
    width, panels = _width(), len(packed)
    padded = packed.shape[1] // width - sum(_SHARES)
    _, scale, rest = packed.split([width * each for each in (*_SHARES, padded)], 1)
    whole = rest.reshape(panels, padded // 4, width, 4).transpose(1, 2).reshape(panels * width, padded)
    wide: Tensor = whole * scale.contiguous().view(torch.float32).view(-1, 1)
    return wide[:rows, :columns].contiguous()


def coarse_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    """``(x (T, K), packed, bias (N,) or None, N, K) -> (T, N)``: x W^T + b, all float32.

    Each token is rounded to eight bits, too: to whole numbers times a 127th of its largest. The bits of a token do not
    depend on the others. One with a number that is not finite is NaN.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; it must have {columns} columns of torch.float32")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(len(x), rows)
    failed = _linear()(
        x.data_ptr(), len(x), x.stride(0), columns, packed.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), rows, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"there is no memory for tokens {tuple(x.shape)} in eight bits")
    return y


coarse_product = as_operator(
    coarse_linear, fake=lambda x, packed, bias, rows, columns: x.new_empty(x.shape[0], rows)
)
"""`coarse_linear` as an operator, which graphs record."""


def address() -> int:
    """Of the function that multiplies."""
    return entry(_linear())


@cache
def _width() -> int:
    width = ctypes.c_int64()
    _kernels()["coarse_width"](ctypes.addressof(width))
    return width.value


def _linear() -> Kernel:
    return _kernels()["linear_coarse"]


@cache
def _kernels() -> dict[str, Kernel]:
    names = (("linear_coarse", "=plllpppli"), ("coarse_width", "p"))
    return dict(kernels(Path(__file__).parent / "coarse.c", names))
