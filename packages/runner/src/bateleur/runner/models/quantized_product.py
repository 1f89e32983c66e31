"""Products with quantised matrices, in plain torch, and by Triton kernels on CUDA."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models import native
from bateleur.runner.models.operators import operator
from bateleur.runner.models.quantized import QuantizedMatrix

_TILE = 1 << 20
"""Weights that are dequantised at once: 4 MB in float32, which stay in a processor's cache."""


@operator("quantized", lambda x, parts, scheme, bias: x.new_empty(x.shape[0], parts[0].shape[0]))
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


def product(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` (T, N) for x (T, K) and a quantised W (N, K), see `quantized_linear`."""
    return quantized_linear(x, list(matrix.tensors().values()), matrix.scheme.key(), bias)


def warm_sizes(most: int, groups: int = 1) -> list[int]:
    """Return row counts, at most `most`, whose products launch every kernel of a matrix, or of `groups` matrices."""
    return sorted({min(each * groups, most) for each in (1, 32, 257)} | {1, most})
