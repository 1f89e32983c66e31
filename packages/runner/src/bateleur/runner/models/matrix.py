"""Weight matrices in the memory layout that is fastest on the processor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.runner.models import native
from bateleur.runner.models.lora import LoraWeights, add_lora
from bateleur.runner.models.native.quantized import PackedMatrix
from bateleur.runner.models.quantized import QuantizedMatrix, Scheme, warm_sizes

_FEW_ENTRIES = 1 << 17
"""Below this size, calling oneDNN takes longer than it saves: 13 us per product, and 3 us with the BLAS."""

_FEW_TOKENS = 16 if torch.__version__.startswith("2.11.") else 1
"""For fewer tokens, the oneDNN of torch 2.11 computes other sums."""


class Projection:
    """Linear layer `x W^T + b`, with W (rows, columns) and b (rows,) or None. W may be packed or quantised."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, device: torch.device | None = None) -> None:
        """device: device for a weight on the `meta` device; its memory is allocated there at the first read."""
        self.stored: Tensor | None = weight
        """W in its plain layout, on the `meta` device before the first read; None if it is packed or quantised."""
        self._device = device or weight.device
        self._packed: Tensor | None = None
        self._native: Tensor | None = None
        (self.num_rows, self.num_columns), self.dtype = weight.shape, weight.dtype
        self.bias = bias
        self.lora: LoraWeights | None = None
        """Low-rank matrices of adapters, if any may be used."""
        self.pieces: tuple[Rows, ...] = ()
        """Consecutive ranges of rows of a quantised W, which replace `stored`; () if W is not quantised."""

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return (T, rows) for x (T, columns). adapters: (T,) int32 LoRA slot of each token; None: no LoRA."""
        y = self.product(x, self.bias)
        if self.lora is not None and adapters is not None:
            add_lora(y, x, self.lora.a_ARK, self.lora.b_ANR, adapters)
        return y

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W^T + bias` without adapters."""
        if self._native is not None:
            return native.product(x, self._native, bias, self.num_rows)
        if self.stored is not None:
            return F.linear(x, self.weight if self.stored.is_meta else self.stored, bias)
        if self.pieces:
            found = [each(x, bias) for each in self.pieces]
            return found[0] if len(found) == 1 else torch.cat(found, 1)
        tokens = x.shape[0]
        size = _padded(tokens)
        if size > tokens:
            x = F.pad(x, (0, 0, 0, size - tokens))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return y[:tokens]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (rows, columns) of the weight W."""
        return self.num_rows, self.num_columns

    @property
    def weight(self) -> Tensor:
        """Weight W (rows, columns): the given tensor, or a copy if it is packed or quantised."""
        if self.stored is not None:
            self.stored = allocated(self.stored, self._device)
            return self.stored
        if self.pieces:
            return torch.cat([each.weight(self.dtype) for each in self.pieces])
        if self._native is not None:
            return native.unpack(self._native, self.num_rows).to(self.dtype)
        assert self._packed is not None
        return self._packed.to_dense()

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> Projection:
        """Return the projection of a quantised matrix (rows, columns), for tokens of `dtype`."""
        made = cls(torch.empty(matrix.shape, dtype=dtype, device="meta"), device=matrix.codes.device)
        made.stored, made.pieces = None, (Rows(0, matrix),)
        return made

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the weight under `name`, or codes and scales of quantised rows under names that begin with `name`."""
        if self.pieces:
            held = [each.tensors(f"{name}.{each.first}.") for each in self.pieces]
            return {name: tensor for each in held for name, tensor in each.items()}
        return {name: self.weight}

    def quantize(self, pieces: Iterable[tuple[int, int, Scheme | None, int | None]]) -> None:
        """Replace the weight by uninitialised codes and scales.

        pieces: (first row, row after the last, scheme, groups) for consecutive ranges of rows. Rows without a scheme
        stay plain. groups: number of scale groups, as for `QuantizedMatrix.empty`.
        """
        assert self.stored is not None

        def rows(first: int, end: int, scheme: Scheme | None, groups: int | None) -> Rows:
            shape, device = (end - first, self.num_columns), self._device
            if scheme is None:
                return Rows(first, Projection(torch.empty(shape, dtype=self.dtype, device=device)))
            return Rows(first, QuantizedMatrix.empty(scheme, shape, groups, device))

        self.pieces = tuple(rows(*each) for each in pieces)
        assert self.pieces[-1].end == self.num_rows
        self.stored = None

    @property
    def in_c(self) -> CProduct | None:
        """Arguments for C kernels that call this product; None unless it is packed for C kernels and float32."""
        if self._native is None or self.dtype != torch.float32:
            return None
        packed = self._native
        columns = packed.shape[1] * packed.shape[3]
        return CProduct(native.address(packed, self.dtype), packed, self.bias, self.num_rows, columns)

    def warm_up(self, most: int) -> None:
        """Launch products of up to `most` tokens with the quantised rows, so that their kernels are loaded."""
        for piece in self.pieces:
            matrix = piece.matrix
            if isinstance(matrix, QuantizedMatrix) and not matrix.codes.is_cpu:
                for tokens in warm_sizes(most):
                    piece(matrix.codes.new_zeros(tokens, matrix.columns, dtype=self.dtype), self.bias)

    @property
    def in_another_layout(self) -> bool:
        """Whether the weight or its quantised rows are stored in a packed layout."""
        return isinstance(self.pieces[0].matrix, PackedMatrix) if self.pieces else self.stored is None

    def pack(self, *, recorded: bool = False) -> None:
        """Replace the weight by a layout with faster CPU products, if there is one.

        With a C compiler, our C kernels multiply float32 and bfloat16 (`native`). Their layout stores float32 weights
        in half of the memory if bfloat16 represents them exactly, as in most checkpoints; products are the same.
        Without a C compiler, oneDNN multiplies large float32 matrices. Other matrices stay as they are, for torch's
        BLAS, which takes up to three times as long as oneDNN for more than one token (`benchmarks/layout.py`).

        With C kernels, or oneDNN with AVX-512, a token's result has the same bits in every batch. With the BLAS, its
        rounding depends on the number of tokens.

        recorded: whether graphs will be captured over the projection. Then oneDNN is not used, because its packed
        matrix has no data pointer, which graphs need.
        """
        self.pieces = tuple(each.packed(self.dtype, recorded) for each in self.pieces)
        if self.stored is None:
            return
        weight = self.weight
        if native.packs(weight):
            self._native, self.stored = native.pack(native.narrowed(weight)), None
            return
        suited = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= _FEW_ENTRIES
        if suited and torch.backends.mkldnn.is_available() and not recorded:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
            self.stored = None


@dataclass(frozen=True, slots=True)
class Rows:
    """A range of rows of a projection, quantised or plain. first: its first row."""

    first: int
    matrix: QuantizedMatrix | PackedMatrix | Projection

    @property
    def end(self) -> int:
        """Index in the projection of the row after the last."""
        return self.first + self.matrix.shape[0]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product (T, N) with x (T, K). bias: bias of all rows of the projection."""
        return self.matrix.product(x, None if bias is None else bias[self.first : self.end])

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return these rows of the weight, (N, K). Quantised or packed rows are copied and get `dtype`."""
        return self.matrix.weight if isinstance(self.matrix, Projection) else self.matrix.dequantize().to(dtype)

    def packed(self, dtype: torch.dtype, recorded: bool) -> Rows:
        """Return the rows, packed if a C kernel for tokens of `dtype` exists. recorded: see `Projection.pack`."""
        if isinstance(self.matrix, Projection):
            self.matrix.pack(recorded=recorded)
        if not isinstance(self.matrix, QuantizedMatrix):
            return self
        packed = PackedMatrix.of(self.matrix, dtype)
        return self if packed is None else Rows(self.first, packed)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the stored tensors, such as codes and scales, by names that begin with `prefix`."""
        if isinstance(self.matrix, Projection):
            return self.matrix.tensors(f"{prefix}plain")
        return self.matrix.tensors(prefix)


def _padded(tokens: int) -> int:
    """Return the padded number of tokens of a oneDNN product: up to a quarter more, in four sizes per power of two.

    oneDNN compiles a kernel for each number of tokens and matrix shape. That takes milliseconds and half a megabyte.
    """
    step = 1 << max(0, (tokens - 1).bit_length() - 3) if tokens else 1
    return max(-(-tokens // step) * step, _FEW_TOKENS if tokens else 0)


def empty_projection(rows: int, columns: int, like: Tensor, *, bias: bool = False) -> Projection:
    """Return a projection with the dtype and device of `like`. Its memory is allocated at the first read.

    In float32 on a CPU the matrix is stored by columns, because the BLAS is then faster for few tokens
    (`benchmarks/layout.py`). This matters for matrices that are too small to be packed. Elsewhere it is stored by rows.
    """
    by_columns = like.device.type == "cpu" and like.dtype == torch.float32
    strides = (1, rows) if by_columns else (columns, 1)
    weight = torch.empty_strided((rows, columns), strides, dtype=like.dtype, device="meta")
    return Projection(weight, like.new_empty(rows) if bias else None, like.device)


def allocated(weight: Tensor, device: torch.device) -> Tensor:
    """Return the weight if it is on `device`; else (on `meta`) uninitialised memory for it on `device`."""
    if weight.device == device:
        return weight
    # `empty_like` would import torch's symbolic shapes
    return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
