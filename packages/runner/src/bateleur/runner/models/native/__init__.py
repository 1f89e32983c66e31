"""Products with packed matrices by C kernels. Shapes: T tokens, N rows, K columns, P panels of WIDTH rows."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op, skip_dispatcher
from bateleur.metadata.native import entry, kernels, unavailable_reason

F = TypeVar("F", bound=Callable[..., Any])
_NAMES = {
    (torch.float32, torch.float32): "linear_float",
    (torch.float32, torch.bfloat16): "linear_wide",
    (torch.bfloat16, torch.bfloat16): "linear_bf16",
}
"""Kernels by dtype of tokens and of the packed matrix."""
_SIGNATURES = (*((name, "=plllpppli") for name in _NAMES.values()), ("panel_width", "p"))
_kernels = cache(partial(kernels, Path(__file__).parent / "linear.c", _SIGNATURES))


def packs(weight: Tensor) -> bool:
    """Return whether a C kernel exists for `weight` (N, K): float32, or bfloat16 with an even number of columns."""
    if weight.device.type != "cpu" or (weight.dtype, weight.dtype) not in _NAMES or not weight.numel():
        return False
    return weight.shape[1] % _columns(weight) == 0 and unavailable_reason() is None


def narrowed(weight: Tensor) -> Tensor:
    """Return `weight` (N, K) in bfloat16 if it is float32, K is even, and bfloat16 represents all numbers exactly.

    That is so if the checkpoint stores bfloat16. Otherwise the weight is returned unchanged.
    """
    if weight.dtype != torch.float32 or weight.shape[1] % 2:
        return weight
    parts = weight.view(torch.int32).split(1024)  # the first part decides for most
    return weight if any((each & 0xFFFF).any() for each in parts) else weight.bfloat16()


def packed_bytes(rows: int, columns: int, dtype: torch.dtype, stored: torch.dtype) -> int | None:
    """Return the bytes of a weight of `dtype` after `pack`; None if it can't be packed.

    stored: dtype in the checkpoint; float32 weights whose numbers are stored in bfloat16 are packed in bfloat16.
    """
    unpacked = (dtype == torch.bfloat16 and columns % 2) or not rows * columns
    if unpacked or (dtype, dtype) not in _NAMES or unavailable_reason() is not None:
        return None
    if stored == torch.bfloat16 and columns % 2 == 0:
        dtype = stored
    width = panel_width()
    return -(-rows // width) * width * columns * dtype.itemsize


def describe_kernels(device: torch.device) -> str | None:
    """Return a text for `bateleur info`: which kernels a CPU uses, and why. None for other devices."""
    if device.type != "cpu":
        return None
    return "compiled for this processor" if unavailable_reason() is None else f"torch's own: {unavailable_reason()}"


def pack(weight: Tensor) -> Tensor:
    """Return W (N, K) in P panels of WIDTH rows, the last padded with zeros.

    Shapes are (P, K, WIDTH, 1) for float32, and (P, K / 2, WIDTH, 2) for bfloat16.
    """
    (rows, columns), width, together = weight.shape, panel_width(), _columns(weight)
    panels = -(-rows // width)
    packed = torch.empty(panels, columns // together, width, together, dtype=weight.dtype)
    full, rest = divmod(rows, width)
    packed[:full] = weight[: rows - rest].reshape(full, width, columns // together, together).transpose(1, 2)
    if rest:
        packed[full] = 0
        packed[full, :, :rest] = weight[rows - rest :].reshape(rest, columns // together, together).transpose(0, 1)
    return packed


def unpack(packed: Tensor, rows: int) -> Tensor:
    """Return the matrix (N, K) that `pack` packed. rows: N."""
    panels, pairs, width, together = packed.shape
    return packed.transpose(1, 2).reshape(panels * width, pairs * together)[:rows].contiguous()


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return `x W^T + b` (T, N) of x (T, K), W (N, K) from `pack` and b (N,) or None, summed in float32, rounded once.

    rows: N. x and b are float32, or all are bfloat16. Float32 x gets the same bits from a bfloat16 matrix as from its
    float32 copy. A token's bits do not depend on other tokens.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, columns = x.shape
    expected = packed.shape[1] * packed.shape[3]
    dtype = packed.dtype if bias is None else bias.dtype
    if columns != expected or (bias is not None and x.dtype != dtype) or (x.dtype, packed.dtype) not in _NAMES:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; it must have {expected} columns of {dtype}")
    y = x.new_empty(tokens, rows)
    _kernels()[_NAMES[x.dtype, packed.dtype]](
        x.data_ptr(), tokens, x.stride(0), columns, packed.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), rows, torch.get_num_threads(),
    )  # fmt: skip
    return y


def address(packed: Tensor, dtype: torch.dtype) -> int:
    """Return the address of the C function that multiplies tokens of `dtype` with the matrix `packed`."""
    return entry(_kernels()[_NAMES[dtype, packed.dtype]])


_library = Library("bateleur", "FRAGMENT")


def as_operator(form: F, fake: Callable[..., Tensor]) -> F:
    """Return the C product `form` as a torch operator, so that graphs can capture it. Other CPU calls run `form`.

    fake: returns an empty result of the same shape, for tracing.
    """
    return skip_dispatcher(define_op(_library, form, Implementations(form), mutates=(), fake=fake), form)


product = as_operator(packed_linear, lambda x, packed, bias, rows: x.new_empty(x.shape[0], rows))


def _columns(weight: Tensor) -> int:
    """Return how many columns of `weight` are interleaved in the packed layout."""
    return 2 if weight.dtype == torch.bfloat16 else 1


@cache
def panel_width() -> int:
    """Return the number of rows of a panel, WIDTH, which depends on the processor."""
    width = ctypes.c_int64()
    _kernels()["panel_width"](ctypes.addressof(width))
    return width.value
