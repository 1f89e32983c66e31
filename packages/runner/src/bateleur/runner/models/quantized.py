"""Quantised matrices, stored as codes and scales, and products with them.

Shapes: N rows of a matrix, K columns, G groups of columns with one scale each, E matrices of a grouped projection.

A weight is `(code - zero) * scale`, computed in float32 and rounded once to the dtype of the tokens. A product uses the
rounded weights, so it equals the product with a matrix that was dequantised on load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models import native
from bateleur.runner.models.operators import operator


class Layout(StrEnum):
    """Memory layout of codes: FP8 (F8), INT8 (I8), INT4 (I4), NVFP4 (F4), MXFP4 (MX4).

    If a byte has two codes, the low 4 bits are the code of an even column, the high 4 bits that of the next column.
    """

    F8 = "F8"
    """(N, K) uint8, the bits of float8 e4m3."""
    I8 = "I8"
    """(N, K) int8."""
    I4 = "I4"
    """(N, K / 2) uint8, two unsigned codes a byte. Without zeros, 8 stands for 0."""
    F4 = "F4"
    """(N, K / 2) uint8, two numbers e2m1 a byte; scales are the bits of e4m3, with a float32 factor for each row."""
    MX4 = "MX4"
    """Codes as in F4; scales are the bits of e8m0, which are powers of two."""


PACKED = (Layout.I4, Layout.F4, Layout.MX4)
"""Layouts with two codes a byte."""
_MIDDLE = 8
"""The code of I4 that stands for 0 if there are no zeros."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE = 1 << 20
"""Weights that are dequantised at once: 4 MB in float32, which stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Describes how a matrix is quantised: code layout, scale groups, zero points. Rows with one scheme can be stacked.

    In each row, `group` consecutive columns have a common scale. Column k belongs to group `(start + k) // group`, so
    the first group has `start` columns fewer, as after cutting a matrix within a group. If `indexed`, a table
    (`QuantizedMatrix.index`) gives the group of each column instead.
    zeros: whether each group has a zero point. divides: for NVFP4 (F4), whether the scales of a row are divided by the
    factor of the row; if not, they are multiplied by it. scale_dtype: uint8 for F4 and MX4, see `Layout`.
    """

    layout: Layout
    group: int
    """Columns with a common scale; at least K means one scale for each row."""
    scale_dtype: torch.dtype = torch.float32
    zeros: bool = False
    divides: bool = False
    indexed: bool = False
    start: int = 0
    """Columns of the first group that come before this part of the matrix."""

    def cut(self, first: int, end: int) -> Self:
        """Return the scheme of the part of the matrix with the columns [first, end)."""
        return self if self.indexed else replace(self, start=(self.start + first) % self.group)

    def key(self) -> str:
        """Return all fields except `scale_dtype` as text, an argument of operators. `scheme_of` parses it."""
        flags = int(self.zeros), int(self.divides), int(self.indexed)
        return " ".join(map(str, (self.layout.value, self.group, self.start, *flags)))

    def __str__(self) -> str:
        names = {Layout.F8: "FP8 e4m3", Layout.I8: "INT8", Layout.I4: "INT4", Layout.F4: "NVFP4", Layout.MX4: "MXFP4"}
        more = "zero points, " * self.zeros + "act order, " * self.indexed
        return f"{names[self.layout]}, {more}groups of {self.group}"


@cache
def scheme_of(key: str, scale_dtype: torch.dtype) -> Scheme:
    """Return the scheme whose `Scheme.key` is this text."""
    layout, *numbers = key.split()
    group, start, zeros, divides, indexed = map(int, numbers)
    return Scheme(Layout(layout), group, scale_dtype, bool(zeros), bool(divides), bool(indexed), start)


def tensors_of(matrix: Any, prefix: str) -> dict[str, Tensor]:
    """Return the fields of a dataclass that are tensors, by names that begin with `prefix`."""
    named = {prefix + each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantised matrix (N, K), or E of them; then all tensors except `index` have a leading dimension E.

    columns: K.
    codes: (N, K) int8 for INT8, (N, K) uint8 for FP8, (N, K / 2) uint8 for 4-bit layouts, rounded up.
    scales: (N, G) of dtype `scheme.scale_dtype`, one per row and group of columns.
    zeros: (N, G) zero points of the codes' dtype; None without zero points.
    factors: (N,) float32, one per row, for NVFP4 (F4); None for other layouts.
    index: (K,) int32, the group of each column, if `scheme.indexed`; else None.
    """

    scheme: Scheme
    columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None
    index: Tensor | None = None

    @classmethod
    def empty(cls, scheme: Scheme, shape: tuple[int, ...], groups: int | None, device: torch.device) -> Self:
        """Return an uninitialised matrix (N, K) or (E, N, K). groups: scale groups of a row; None: derived from K."""
        *lead, columns = shape
        groups = -(-(scheme.start + columns) // scheme.group) if groups is None else groups
        width = -(-columns // 2) if scheme.layout in PACKED else columns
        code = torch.int8 if scheme.layout is Layout.I8 else torch.uint8

        def new(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device)

        codes, scales = new(*lead, width, dtype=code), new(*lead, groups, dtype=scheme.scale_dtype)
        zeros = new(*lead, groups, dtype=code) if scheme.zeros else None
        factors = new(*lead, dtype=torch.float32) if scheme.layout is Layout.F4 else None
        index = new(columns, dtype=torch.int32) if scheme.indexed else None
        return cls(scheme, columns, codes, scales, zeros, factors, index)

    @classmethod
    def of(cls, key: str, columns: int, parts: Sequence[Tensor]) -> Self:
        """Return the matrix with the tensors `parts`, in the order of `tensors`. key: its `Scheme.key`. columns: K."""
        codes, scales, *rest = parts
        scheme, more = scheme_of(key, scales.dtype), iter(rest)
        zeros = next(more) if scheme.zeros else None
        factors = next(more) if scheme.layout is Layout.F4 else None
        return cls(scheme, columns, codes, scales, zeros, factors, next(more) if scheme.indexed else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, K) or (E, N, K)."""
        return (*self.codes.shape[:-1], self.columns)

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the stored tensors, such as codes and scales, by names that begin with `prefix`."""
        return tensors_of(self, prefix)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change(tensor)` in place of every tensor except `index`."""
        tensors: dict[str, Any] = {name: change(each) for name, each in self.tensors().items() if name != "index"}
        return replace(self, **tensors)

    def rows(self, rows: slice | Tensor | int) -> Self:
        """Return some of the N rows of a matrix (N, K), or one of E matrices; views unless `rows` is a tensor."""
        return self._changed(lambda each: each[rows])

    def cut_columns(self, first: int, end: int) -> Self:
        """Return the columns [first, end) and their scales. Raises ValueError if a byte of two codes would be split."""
        scheme, packed = self.scheme, self.scheme.layout in PACKED
        if (first, end) == (0, self.columns):
            return self
        if packed and first % 2:
            raise ValueError(f"columns from {first} on start within a byte of two codes")
        codes = self.codes[..., first // 2 : -(-end // 2)] if packed else self.codes[..., first:end]
        if self.index is not None:  # all groups may be met
            return replace(self, columns=end - first, codes=codes, index=self.index[first:end])
        groups = slice((scheme.start + first) // scheme.group, -(-(scheme.start + end) // scheme.group))
        scales, zeros = self.scales[..., groups], None if self.zeros is None else self.zeros[..., groups]
        scheme = scheme.cut(first, end)
        return replace(self, scheme=scheme, columns=end - first, codes=codes, scales=scales, zeros=zeros)

    def scaled(self, factors: Tensor) -> Self:
        """Return the matrix with row n multiplied by factors[n]. factors: (N,) float32.

        NVFP4 already has row factors, and only they change. Other layouts get float32 scales; MXFP4 is not supported.
        """
        if self.factors is not None:
            return replace(self, factors=self.factors / factors if self.scheme.divides else self.factors * factors)
        assert self.scheme.layout is not Layout.MX4, "families with MXFP4 files have no factors"
        scheme = replace(self.scheme, scale_dtype=torch.float32)
        return replace(self, scheme=scheme, scales=self.scales.float() * factors[:, None])

    def copy_(self, other: Self) -> None:
        """Overwrite this matrix with the tensors of another one, which must have the same scheme and sizes."""
        assert self.scheme == other.scheme, f"{other.scheme} is copied to {self.scheme}"
        for each, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            assert each.shape == theirs.shape
            each.copy_(theirs)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W^T + b` (T, N) for x (T, K) and this matrix W, see `quantized_linear`."""
        return quantized_linear(x, list(self.tensors().values()), self.scheme.key(), bias)

    def dequantize(self) -> Tensor:
        """Return the weights (N, K) or (E, N, K) in float32."""
        scheme, device = self.scheme, self.codes.device
        values = unpack(self.codes, scheme.layout)[..., : self.columns]
        stored = {Layout.MX4: torch.float8_e8m0fnu, Layout.F4: torch.float8_e4m3fn}.get(scheme.layout)
        scales = (self.scales if stored is None else self.scales.view(stored)).float()
        if self.factors is not None:
            scales = scales / self.factors[..., None] if scheme.divides else scales * self.factors[..., None]
        group = self.index
        if group is None:
            group = (torch.arange(self.columns, device=device) + scheme.start) // scheme.group
        if self.zeros is not None:
            values -= self.zeros.float()[..., group]
        elif scheme.layout is Layout.I4:
            values -= _MIDDLE
        return values.mul_(scales[..., group])


def unpack(codes: Tensor, layout: Layout) -> Tensor:
    """Return codes as float32 numbers (..., K), without zero points and scales. INT4 codes become 0 .. 15.

    codes: int8 for INT8, uint8 for others; (..., K), or (..., K / 2) with two 4-bit codes a byte. See `Layout`.
    """
    if layout is Layout.F8:
        return codes.view(torch.float8_e4m3fn).float()
    if layout is Layout.I8:
        return codes.float()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if layout is Layout.I4:
        return nibbles.float()
    table = torch.tensor([*_E2M1, *(-each for each in _E2M1)], device=codes.device)
    return table[nibbles.int()]


@operator("quantized", lambda x, parts, scheme, bias: x.new_empty(x.shape[0], parts[0].shape[0]))
def quantized_linear(x: Tensor, parts: Sequence[Tensor], scheme: str, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` (T, N) in x's dtype, for x (T, K), a quantised W (N, K) and `bias` b (N,) or None.

    parts, scheme: values of `QuantizedMatrix.tensors`, and `Scheme.key`, of W. Weights are rounded to x's dtype. Sums
    are float32. The bits of a token's result do not depend on the other tokens.
    """
    matrix = QuantizedMatrix.of(scheme, x.shape[1], parts)
    rows, columns = matrix.shape
    y, step = x.new_empty(x.shape[0], rows), max(1, _TILE // max(columns, 1))
    for first in range(0, rows, step):
        tile = slice(first, min(first + step, rows))
        weight = matrix.rows(tile).dequantize().to(x.dtype)
        y[:, tile] = _product(x, weight, None if bias is None else bias[tile])
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` for x (T, K), a plain W (N, K) and b (N,) or None.

    Without C kernels, a CPU computes token by token: the rounding of torch's BLAS depends on the number of tokens.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    if native.packs(weight):
        return native.packed_linear(x, native.pack(weight), bias, weight.shape[0])
    y = x.new_empty(x.shape[0], weight.shape[0])
    for token, row in zip(x.contiguous(), y, strict=True):
        row.copy_(torch.mv(weight, token))
    return y if bias is None else y.add_(bias)


def warm_sizes(most: int, groups: int = 1) -> list[int]:
    """Return batch sizes from 1 to `most` that cover every kernel of a product with a quantised matrix.

    The kernel depends on the batch size. groups: number of experts of a grouped product; 1 for one matrix.
    """
    return sorted({min(each * groups, most) for each in (1, 32, 257)} | {1, most})
