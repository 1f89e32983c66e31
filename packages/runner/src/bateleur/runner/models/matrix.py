"""Matrices that tokens are multiplied with, laid out for the processor that does it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.runner.models import native
from bateleur.runner.models.lora import LoraWeights, add_lora

_FEW_ENTRIES = 1 << 17
"""Below that, calling oneDNN takes longer than it saves: 13 us a product, and 3 us through the BLAS."""

_FEW_TOKENS = 16 if torch.__version__.startswith("2.11.") else 1
"""The oneDNN of torch 2.11 takes other sums for fewer."""


class Projection:
    """`x W^T + b`, with W (rows, columns) and b (rows,) or None."""

    __slots__ = ("_dtype", "_native", "_packed", "_weight", "bias", "lora", "num_columns", "num_rows")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._native: Tensor | None = None
        (self.num_rows, self.num_columns), self._dtype = weight.shape, weight.dtype
        self.bias = bias
        self.lora: LoraWeights | None = None
        """Low-rank matrices of adapters, if any may be used."""

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """(T, rows) of x (T, columns). adapters: (T,) int32 adapter slot of each token; None for none."""
        y = self._product(x)
        if self.lora is not None and adapters is not None:
            add_lora(y, x, self.lora.a_ARK, self.lora.b_ANR, adapters)
        return y

    def _product(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return native.product(x, self._native, self.bias, self.num_rows)
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
        if self._native is not None:
            return native.unpack(self._native, self.num_rows).to(self._dtype)
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def in_c(self) -> CProduct | None:
        """How a kernel in C calls it; None where it is not float32 in our layout."""
        if self._native is None or self._dtype != torch.float32:
            return None
        packed = self._native
        columns = packed.shape[1] * packed.shape[3]
        return CProduct(native.address(packed, self._dtype), packed, self.bias, self.num_rows, columns)

    @property
    def is_packed(self) -> bool:
        """Whether W is kept in another layout than it was given in."""
        return self._weight is None

    def pack(self, *, recorded: bool = False) -> None:
        """Lay W out as products on a CPU read it, in place of the tensor that was given, where that makes them faster.

        That is for our kernels in float32 and bfloat16, where there is a compiler (`native`), and else for oneDNN in
        float32, where torch's BLAS takes up to three times as long for more than one token (`benchmarks/layout.py`).
        Both give a token the same bits whatever is beside it, oneDNN where there is AVX-512; the BLAS rounds by the
        number of tokens. oneDNN's matrix has no address. Our layout keeps float32 numbers that bfloat16 holds, which
        are those of most checkpoints, in half of the memory, and products are as exact.

        recorded: graphs will be recorded over it.
        """
        weight = self._weight
        if weight is None:
            return
        if native.packs(weight):
            self._native, self._weight = native.pack(native.narrowed(weight)), None
        elif _suits_onednn(weight) and not recorded:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
            self._weight = None


def _suits_onednn(weight: Tensor) -> bool:
    floats = weight.device.type == "cpu" and weight.dtype == torch.float32
    return floats and weight.numel() >= _FEW_ENTRIES and torch.backends.mkldnn.is_available()


def _padded(tokens: int) -> int:
    """Tokens of a packed product: as many, or up to a quarter more, so that four sizes do for each power of two.

    oneDNN makes a kernel for each number of tokens and shape of matrix, which takes some milliseconds and half a
    megabyte.
    """
    step = 1 << max(0, (tokens - 1).bit_length() - 3) if tokens else 1
    return max(-(-tokens // step) * step, _FEW_TOKENS if tokens else 0)


def empty_projection(rows: int, columns: int, like: Tensor, *, bias: bool = False) -> Projection:
    """A projection of uninitialised memory, with the dtype and the device of `like`.

    In float32 on CPU the matrix is stored by columns: the BLAS then reads it as the plain right-hand side of a product,
    which for one to a few tokens takes less time (`benchmarks/layout.py`): those matrices stay so that are too small to
    be packed. Elsewhere it is stored by rows.
    """
    by_columns = like.device.type == "cpu" and like.dtype == torch.float32
    weight = like.new_empty(columns, rows).t() if by_columns else like.new_empty(rows, columns)
    return Projection(weight, like.new_empty(rows) if bias else None)
