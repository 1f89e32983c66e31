"""Products with quantised matrices: operators with a form in plain torch, and Triton kernels on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models import native
from bateleur.runner.models.operators import operator
from bateleur.runner.models.quantized import QuantizedMatrix

_TILE = 1 << 20
"""Weights that are dequantised at once: 4 MB in float32, which stay in a processor's cache."""


@operator("quantized", lambda x, parts, scheme, bias: x.new_empty(x.shape[0], parts[0].shape[0]), direct=True)
def quantized_linear(x: Tensor, parts: Sequence[Tensor], scheme: str, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` (T, N) in x's dtype, for x (T, K), a quantised W (N, K) and b (N,).

    parts, scheme: `QuantizedMatrix.tensors` and `Scheme.key` of W. Its weights are rounded to x's dtype. Sums are
    float32. The bits of a token do not depend on the other tokens.
    """
    matrix = QuantizedMatrix.of(scheme, x.shape[1], parts)
    rows, columns = matrix.shape
    y, step = x.new_empty(x.shape[0], rows), max(1, _TILE // max(columns, 1))
    for first in range(0, rows, step):
        tile = slice(first, min(first + step, rows))
        weight = matrix.rows(tile).dequantize().to(x.dtype)
        y[:, tile] = _product(x, weight, None if bias is None else bias[tile])
    return y


@operator("quantized", lambda x, ends, parts, scheme: x.new_empty(x.shape[0], parts[0].shape[1]), direct=True)
def quantized_grouped(x: Tensor, ends: Tensor, parts: Sequence[Tensor], scheme: str) -> Tensor:
    """Return (S, N): each row of x (S, K) times the transpose of its group's quantised matrix, as `grouped_product`.

    ends: (E,) int32, end of the rows of each group. parts, scheme: tensors and scheme of W (E, N, K), as in
    `quantized_linear`.
    """
    y, count = x.new_zeros(x.shape[0], parts[0].shape[1]), len(parts[0])
    if x.is_cpu:
        every: list[int] = ends.tolist()
        for e, (first, end) in enumerate(zip([0, *every], every, strict=False)):
            if first < end:
                y[first:end] = quantized_linear(x[first:end], [each[e] for each in parts], scheme, None)
        return y
    rows_S1 = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    for e in reversed(range(count)):  # no wait for `ends`; the first group that ends after a row is its own
        product = quantized_linear(x, [each[e] for each in parts], scheme, None)
        y = torch.where(rows_S1 < ends[e], product, y)
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` for x (T, K), a plain W (N, K) and b (N,) or None.

    A CPU uses the C kernel of plain matrices, or computes token by token, because the rounding of torch's BLAS depends
    on the number of tokens.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    if native.packs(weight):
        return native.packed_linear(x, native.pack(weight), bias, weight.shape[0])
    y = x.new_empty(x.shape[0], weight.shape[0])
    for token, row in zip(x.contiguous(), y, strict=True):
        row.copy_(torch.mv(weight, token))
    return y if bias is None else y.add_(bias)


def product(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` (T, N) for x (T, K) and a quantised W (N, K), see `quantized_linear`."""
    return quantized_linear(x, list(matrix.tensors().values()), matrix.scheme.key(), bias)


def warm_sizes(most: int, groups: int = 1) -> list[int]:
    """Return row counts, at most `most`, whose products launch every kernel of a matrix, or of `groups` matrices."""
    return sorted({min(each * groups, most) for each in (1, 32, 257)} | {1, most})


def grouped_product(x: Tensor, ends: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return each row of x (S, K) times the transpose of its group's quantised matrix, see `quantized_grouped`."""
    return quantized_grouped(x, ends, list(matrix.tensors().values()), matrix.scheme.key())
