"""C kernels (`quantized.c`) for products of float32 tokens with matrices of int8 or int4 codes.

Shapes: T tokens, N rows of a matrix, K columns, G groups of columns; P panels of WIDTH rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op, skip_dispatcher
from bateleur.metadata.native import Kernel, kernels, unavailable_reason
from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme, unpack

_NAMES = {Layout.I8: "quantized_i8", Layout.I4: "quantized_i4"}
_MIDDLE = {Layout.I8: 0, Layout.I4: 8}
"""The code that stands for 0 without zero points."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix (N, K) in the panel layout of the C kernels. Padding rows are zero."""

    scheme: Scheme
    shape: tuple[int, int]
    codes: Tensor
    """(P, K, WIDTH) int8, of I4 (P, K / 2, WIDTH) with two columns a byte."""
    scales: Tensor
    """(P, G, WIDTH) float32."""
    zeros: Tensor | None
    """(P, G, WIDTH) float32; None if there are no zero points, and 8 stands for 0 in I4."""

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> PackedMatrix | None:
        """Return the matrix packed for tokens of `dtype`; None if there is no kernel for it."""
        scheme, (rows, columns) = matrix.scheme, matrix.shape
        group, cpu = min(scheme.group, columns), matrix.codes.device.type in ("cpu", "meta")
        if not cpu or dtype != torch.float32 or scheme.layout not in _NAMES or unavailable_reason() is not None:
            return None
        start = scheme.start if matrix.scales.shape[1] > 1 else 0
        if scheme.indexed or start or not rows * columns:
            return None
        if scheme.layout is Layout.I4 and (columns % 2 or group % 2):
            return None
        zeros = None if matrix.zeros is None else _panels(matrix.zeros.float())
        codes = _panels(matrix.codes.view(torch.int8))
        return cls(scheme, (rows, columns), codes, _panels(matrix.scales.float()), zeros)

    @property
    def group(self) -> int:
        """Number of columns with a common scale; all columns if there is one group."""
        return self.scheme.group if self.scales.shape[1] > 1 else self.shape[1]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors in memory, by names that begin with `prefix`."""
        named = {prefix + each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def dequantize(self) -> Tensor:
        """Return the weights (N, K) in float32."""
        codes, scales = (_rows(each, self.shape[0]) for each in (self.codes, self.scales))
        layout = self.scheme.layout
        values = unpack(codes if layout is Layout.I8 else codes.view(torch.uint8), layout)
        group = torch.arange(self.shape[1]) // self.group
        zeros = None if self.zeros is None else _rows(self.zeros, self.shape[0])[:, group]
        return (values - (_MIDDLE[layout] if zeros is None else zeros)) * scales[:, group]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W^T + b` (T, N) for float32 x (T, K)."""
        rows, layout = self.shape[0], self.scheme.layout
        found: Tensor = product(x, self.codes, self.scales, self.zeros, bias, [rows, self.group, layout is Layout.I4])
        return found


def packed_quantized(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, sizes: list[int]
) -> Tensor:
    """Return `x W^T + b` (T, N) float32 of x (T, K) and the tensors of a `PackedMatrix` W.

    sizes: N, columns with a common scale, and whether codes have 4 bits. The bits of a token do not depend on other
    tokens, and equal those of a product with the dequantised matrix.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    (tokens, columns), (rows, group, short) = x.shape, sizes
    y = x.new_empty(tokens, rows)
    _kernels()[_NAMES[Layout.I4 if short else Layout.I8]](
        x.data_ptr(), tokens, x.stride(0), columns, codes.data_ptr(), scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(), group,
        None if bias is None else bias.data_ptr(), y.data_ptr(), rows, torch.get_num_threads(),
    )  # fmt: skip
    return y


_library = Library("bateleur", "FRAGMENT")

product = skip_dispatcher(
    define_op(
        _library,
        packed_quantized,
        Implementations(packed_quantized),
        mutates=(),
        fake=lambda x, codes, scales, zeros, bias, sizes: x.new_empty(x.shape[0], sizes[0]),
    ),
    packed_quantized,
)
"""`packed_quantized` as an operator, which graphs record."""


def _panels(rows: Tensor) -> Tensor:
    """Return the panels (P, C, WIDTH) of a matrix (N, C), with zeros for the rows after the last."""
    width = _width()
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width))
    return padded.view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


def _rows(panels: Tensor, count: int) -> Tensor:
    return panels.transpose(1, 2).flatten(0, 1)[:count].contiguous()


@cache
def _width() -> int:
    width = ctypes.c_int64()
    _kernels()["quantized_width"](ctypes.addressof(width))
    return width.value


@cache
def _kernels() -> dict[str, Kernel]:
    names = (*((name, "=plllppplppli") for name in _NAMES.values()), ("quantized_width", "p"))
    return dict(kernels(Path(__file__).parent / "quantized.c", names))
