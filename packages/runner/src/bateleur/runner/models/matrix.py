"""Weight matrices, in the layout that suits the processor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.runner.models import native
from bateleur.runner.models.lora import LoraWeights, add_lora

_FEW_ENTRIES = 1 << 17
"""Below this size, calling oneDNN takes longer than it saves: 13 us per product, and 3 us with the BLAS."""

_FEW_TOKENS = 16 if torch.__version__.startswith("2.11.") else 1
"""For fewer tokens, the oneDNN of torch 2.11 computes other sums."""


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
        """Return (T, rows) of x (T, columns). adapters: (T,) int32 adapter slot of each token; None for none."""
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
        """W: the given tensor, or a copy once packed."""
        if self._weight is not None:
            return self._weight
        if self._native is not None:
            return native.unpack(self._native, self.num_rows).to(self._dtype)
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def in_c(self) -> CProduct | None:
        """Arguments for C kernels that call this product; None unless it is float32 in our layout."""
        if self._native is None or self._dtype != torch.float32:
            return None
        packed = self._native
        columns = packed.shape[1] * packed.shape[3]
        return CProduct(native.address(packed, self._dtype), packed, self.bias, self.num_rows, columns)

    @property
    def is_packed(self) -> bool:
        """Whether W is stored in another layout than it was given in."""
        return self._weight is None

    def pack(self, *, recorded: bool = False) -> None:
        """Store W in the layout of faster CPU products, instead of the given tensor, if there is one.

        With a compiler, our C kernels take float32 and bfloat16 (`native`). Else oneDNN takes float32, whose BLAS
        products need up to three times as long for more than one token (`benchmarks/layout.py`). With both, a token has
        the same bits whatever the batch (oneDNN: with AVX-512); the BLAS rounds by the number of tokens. oneDNN's
        matrix has no address. Our layout stores float32 numbers that bfloat16 can represent, as in most checkpoints, in
        half of the memory, with equal products.

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
    """Return the padded number of tokens of a oneDNN product: up to a quarter more, in four sizes per power of two.

    oneDNN makes a kernel for each number of tokens and shape of a matrix, which takes milliseconds and half a megabyte.
    """
    step = 1 << max(0, (tokens - 1).bit_length() - 3) if tokens else 1
    return max(-(-tokens // step) * step, _FEW_TOKENS if tokens else 0)


def empty_projection(rows: int, columns: int, like: Tensor, *, bias: bool = False) -> Projection:
    """Return a projection of uninitialised memory, with dtype and device of `like`.

    In float32 on a CPU the matrix is stored by columns: for few tokens the BLAS is then faster
    (`benchmarks/layout.py`), which matters for matrices that are too small to be packed. Elsewhere it is stored by
    rows.
    """
    by_columns = like.device.type == "cpu" and like.dtype == torch.float32
    weight = like.new_empty(columns, rows).t() if by_columns else like.new_empty(rows, columns)
    return Projection(weight, like.new_empty(rows) if bias else None)
