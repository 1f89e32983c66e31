"""Branches of a float32 model on a CPU, each in one call where its kernels are in C: see `branches.c`.

They compute what the operators of their layers do, one behind the other, with the same bits; for few tokens calling
these takes longer than what they compute. Whoever records operators gets the operators.

Shapes: T tokens, M hidden size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.metadata.native import Kernel, kernels
from bateleur.metadata.native.structs import Struct, fields
from bateleur.runner.models import native

REFUSED = 1
"""Of a branch that has not been computed: a row names what there is not, and its operators say what."""


class Matrix(Struct):
    """A product."""

    _fields_: ClassVar = fields("call weight bias", "rows columns")

    @classmethod
    def of(cls, product: CProduct) -> Self:
        """What is pointed to is held by the product."""
        matrix = cls(rows=product.rows, columns=product.columns)
        matrix.point(call=product.address, weight=product.weight, bias=product.bias)
        return matrix


class _Norm(Struct):
    _fields_: ClassVar = [*fields("call weight", "size"), ("eps", ctypes.c_double)]


class _Mlp(Struct):
    _fields_: ClassVar = [("up", Matrix), ("down", Matrix), *fields("act", "gated is_silu")]


class NormCall:
    """A norm of a float32 stream, with the sum before it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: (M,) float32."""
        self.weight = weight
        self._struct = _Norm(native.rms_norm_address(), weight.data_ptr(), len(weight), eps)
        self._at = ctypes.addressof(self._struct)

    def __call__(self, h_TM: Tensor, term_TM: Tensor, factor: float) -> Tensor:
        """Add `factor * term` to h, and normalise that; (T, M) float32 each."""
        y_TM = torch.empty(h_TM.shape)
        functions()["norm_rows"](
            self._at, h_TM.data_ptr(), h_TM.stride(0), term_TM.data_ptr(), term_TM.stride(0), factor,
            y_TM.data_ptr(), h_TM.shape[0], torch.get_num_threads(),
        )  # fmt: skip
        return y_TM


class MlpCall:
    """A feed-forward branch."""

    def __init__(self, up: CProduct, down: CProduct, *, gated: bool, is_silu: bool) -> None:
        self._struct = _Mlp(Matrix.of(up), Matrix.of(down), native.activate_address(), gated, is_silu)
        self._at, self._held = ctypes.addressof(self._struct), (up, down)
        self._columns, self._room, self._width = up.columns, up.rows + down.columns, down.rows

    def __call__(self, x_TM: Tensor) -> Tensor:
        """(T, M) of x (T, M) float32."""
        tokens = x_TM.shape[0]
        assert (x_TM.shape[1], x_TM.stride(1), x_TM.dtype) == (self._columns, 1, torch.float32)
        y_TM, room = x_TM.new_empty(tokens, self._width), x_TM.new_empty(tokens * self._room)
        if functions()["mlp_rows"](
            self._at, x_TM.data_ptr(), x_TM.stride(0), tokens, room.data_ptr(), y_TM.data_ptr(),
            torch.get_num_threads(),
        ):  # fmt: skip
            raise no_memory(tokens)
        return y_TM


def no_memory(tokens: int) -> MemoryError:
    """What is raised where products find none."""
    return MemoryError(f"there is no memory for {tokens} tokens as products read them")


@cache
def functions() -> dict[str, Kernel]:
    """Of `branches.c`, by name."""
    signatures = (
        ("mamba_rows", "=pppllppi"),
        ("ring_rows", "=pppllppi"),
        ("attention_rows", "=pppllppllppi"),
        ("norm_rows", "pplplfpli"),
        ("mlp_rows", "=ppllppi"),
    )
    return dict(kernels(Path(__file__).parent / "branches.c", signatures))
