"""Matrices that tokens are multiplied with, laid out for the processor that does it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ENTRIES = 1 << 17
"""Below that, calling oneDNN takes longer than it saves: 13 us a product, and 3 us through the BLAS."""


class Projection:
    """`x W^T + b`, with W (rows, columns) and b (rows,) or None."""

    __slots__ = ("_packed", "_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(T, rows) of x (T, columns)."""
        if self._weight is not None:
            return F.linear(x, self._weight, self.bias)
        tokens = x.shape[0]
        size = _padded(tokens)
        if size > tokens:
            x = F.pad(x, (0, 0, 0, size - tokens))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y[:tokens]

    @property
    def weight(self) -> Tensor:
        """W: the tensor that was given, or a copy of it once it is packed."""
        if self._weight is not None:
            return self._weight
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def is_packed(self) -> bool:
        """Whether W has no address any more."""
        return self._packed is not None

    def pack(self) -> None:
        """Lay W out in oneDNN's blocks, in place of the tensor that was given, where products get faster by that.

        That is for float32 on CPU, where torch's BLAS takes up to three times as long for more than one token
        (`benchmarks/layout.py`), and rounds by the number of them: with AVX-512 a token's packed product has the same
        bits whatever is beside it. A packed matrix has no address, so that no graph can be recorded over it.
        """
        weight = self._weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if weight.numel() >= _FEW_ENTRIES and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
            self._weight = None


def _padded(tokens: int) -> int:
    """Tokens of a packed product: as many, or up to a quarter more, so that four sizes do for each power of two.

    oneDNN makes a kernel for each number of tokens and shape of matrix, which takes some milliseconds and half a
    megabyte.
    """
    step = 1 << max(0, (tokens - 1).bit_length() - 3) if tokens else 1
    return -(-tokens // step) * step


def empty_projection(rows: int, columns: int, like: Tensor, *, bias: bool = False) -> Projection:
    """A projection of uninitialised memory, with the dtype and the device of `like`.

    In float32 on CPU the matrix is stored by columns: the BLAS then reads it as the plain right-hand side of a product,
    which for one to a few tokens takes less time (`benchmarks/layout.py`): those matrices stay so that are too small to
    be packed. Elsewhere it is stored by rows.
    """
    by_columns = like.device.type == "cpu" and like.dtype == torch.float32
    weight = like.new_empty(columns, rows).t() if by_columns else like.new_empty(rows, columns)
    return Projection(weight, like.new_empty(rows) if bias else None)
