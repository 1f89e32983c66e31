"""C kernels (`quantized.c`) of float32 tokens and int8 or int4 matrices. Shapes: see `native`; G groups of columns."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.metadata.native import kernels, unavailable_reason
from bateleur.runner.models.native import as_operator, panel_width
from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme, tensors_of, unpack

_NAMES = {Layout.I8: "quantized_i8", Layout.I4: "quantized_i4"}
_COLUMNS = {Layout.I8: 4, Layout.I4: 8}
"""Columns whose codes share a word."""
_SIGNATURES = tuple((name, "=plllppplppli") for name in _NAMES.values())
_kernels = cache(partial(kernels, Path(__file__).parent / "quantized.c", _SIGNATURES))
_SIGNS = 0x88 - 0x100
"""Flips the highest bit of both codes of a byte, which lowers them by 8."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix (N, K) in the layout of the C kernels: panels of WIDTH rows, the last padded with zeros.

    codes: int32 words of signed codes, with the first column in the lowest bits. A word has the codes of 4 columns for
    INT8, (P, K / 4, WIDTH), or of 8 for INT4, (P, K / 8, WIDTH), both rounded up. INT4 codes are stored minus 8.
    scales: (P, G, WIDTH) float32, one per row and group of columns.
    zeros: zero points, (P, G, WIDTH) float32, minus 8 for INT4. None if the scheme has no zero points.
    shape: (N, K).
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> Self | None:
        """Return the matrix packed for tokens of `dtype`; None if there is no kernel for it."""
        scheme, (rows, columns) = matrix.scheme, matrix.shape
        group, cpu = min(scheme.group, columns), matrix.codes.device.type in ("cpu", "meta")
        if not cpu or dtype != torch.float32 or scheme.layout not in _NAMES or unavailable_reason() is not None:
            return None
        start = scheme.start if matrix.scales.shape[1] > 1 else 0
        split = group < columns and group % _COLUMNS[scheme.layout]
        if scheme.indexed or start or split or not rows * columns:
            return None
        codes, zeros = matrix.codes.view(torch.int8), None if matrix.zeros is None else matrix.zeros.float()
        if scheme.layout is Layout.I4:
            codes, zeros = codes ^ _SIGNS, None if zeros is None else zeros - 8
        words = F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
        scales = _panels(matrix.scales.float())
        return cls(scheme, (rows, columns), _panels(words), scales, None if zeros is None else _panels(zeros))

    @property
    def group(self) -> int:
        """Number of columns with a common scale; all columns if there is one group."""
        return self.scheme.group if self.scales.shape[1] > 1 else self.shape[1]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the stored tensors, such as codes and scales, by names that begin with `prefix`."""
        return tensors_of(self, prefix)

    def dequantize(self) -> Tensor:
        """Return the weights (N, K) in float32."""
        short, (rows, columns) = self.scheme.layout is Layout.I4, self.shape
        codes = _rows(self.codes, rows).view(torch.int8)
        codes = (codes ^ _SIGNS).view(torch.uint8) if short else codes
        values = unpack(codes, self.scheme.layout)[:, :columns] - 8 * short
        group = torch.arange(columns) // self.group
        if self.zeros is not None:
            values -= _rows(self.zeros, rows)[:, group]
        return values * _rows(self.scales, rows)[:, group]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W^T + b` (T, N) for float32 x (T, K) and this matrix W."""
        rows, layout = self.shape[0], self.scheme.layout
        return product(x, self.codes, self.scales, self.zeros, bias, [rows, self.group, layout is Layout.I4])


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


product = as_operator(packed_quantized, lambda x, codes, scales, zeros, bias, sizes: x.new_empty(x.shape[0], sizes[0]))


def _panels(rows: Tensor) -> Tensor:
    """Return the panels (P, C, WIDTH) of a matrix `rows` (N, C); the last panel is padded with zeros."""
    width = panel_width()
    padded = F.pad(rows, (0, 0, 0, -len(rows) % width))
    return padded.view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


def _rows(panels: Tensor, count: int) -> Tensor:
    return panels.transpose(1, 2).flatten(0, 1)[:count].contiguous()
