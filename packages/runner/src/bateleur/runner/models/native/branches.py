"""Branches of a float32 model on a CPU, each in one call where its kernels are in C: see `branches.c`.

They compute what the operators of their layers do, one behind the other, with the same bits; for few tokens calling
these takes longer than what they compute. Whoever records operators gets the operators.

Shapes: T tokens, M hidden size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bateleur.eagle.heads.spec import CProduct
from bateleur.mamba import MixerRows, SlotPlan
from bateleur.metadata.native import Kernel, kernels, missing
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


class _Slots(Struct):
    _fields_: ClassVar = fields("starts conv_read conv_offset conv_write read write", "write_stride rows")


class _Mlp(Struct):
    _fields_: ClassVar = [("up", Matrix), ("down", Matrix), *fields("act", "gated is_silu")]


@dataclass(frozen=True, slots=True)
class InC:
    """That the branches of a pass may be computed here, and what its layers have in common."""

    slots: _Slots | None = None
    """Of recurrent layers under SLOTS, where all rows decode."""
    held: tuple[Tensor, ...] = ()
    """What is pointed to."""

    @classmethod
    def of(cls, tokens: Tensor, rows: MixerRows | None) -> InC | None:
        """For a pass over these tokens, and its rows in recurrent layers, if there are any; None where there are no
        kernels, or something records operators.
        """
        if not tokens.is_cpu or missing() is not None or _get_current_dispatch_mode() is not None:
            return None
        if rows is None or rows.decodes is None or rows.prompts is not None or rows.step.pieces is not None:
            return cls()
        plan, starts = rows.decodes.plan, rows.decodes.query_start_loc
        if not isinstance(plan, SlotPlan):
            return cls()
        by_row, write = (plan.conv_read, plan.conv_offset, plan.conv_write, plan.ssm_read), plan.ssm_write
        dense = all(each.is_contiguous() for each in (starts, *by_row)) and write.stride(1) == 1
        if not dense or any(each.dtype != torch.int64 for each in (*by_row, write)):
            return cls()
        if starts.dtype != torch.int32:
            return cls()
        held = (starts, *by_row, write)
        return cls(_Slots(*(each.data_ptr() for each in held), write.stride(0), len(plan.ssm_read)), held)


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
    signatures = ("mamba_rows", "=pppllppi"), ("mlp_rows", "=ppllppi")
    return dict(kernels(Path(__file__).parent / "branches.c", signatures))
