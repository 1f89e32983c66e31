"""What the kernels of the planners share. A row without tokens loads no more than its length: the rest is no index.

Legend: R rows of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import fields
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.planners.plans import CopyPlan, FoldPlan, ReplayPlan, SlotPlan


@triton.jit
def load(ptr, row_R, real_R):
    """(R,) int64, 0 in rows that are not real."""
    return tl.load(ptr + row_R, mask=real_R, other=0).to(tl.int64)


@triton.jit
def slot(row_ptr_R, table_column, column_R, real_R):
    """(R,) int64 entries of the table's rows at `column_R`, 0 in rows that are not real."""
    return tl.load(row_ptr_R + column_R * table_column, mask=real_R, other=0).to(tl.int64)


def tile_options() -> dict[str, Any]:
    """Tile size and launch options of all four kernels: a row a thread."""
    return {"BLOCK": 128, "num_warps": 4, "enable_fp_fusion": True}


def dense(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Without strides; for one that is not there, another that is not read in its place."""
    return [first.contiguous(), *(first if each is None else each.contiguous() for each in others)]


def outputs(plan: SlotPlan | CopyPlan | ReplayPlan | FoldPlan) -> list[Tensor]:
    """The fields of a plan. Raises ValueError for strided ones."""
    tensors: list[Tensor] = []
    for field in fields(plan):
        tensor = getattr(plan, field.name)
        if not tensor.is_contiguous():
            raise ValueError(f"out.{field.name} has strides {tensor.stride()}; a kernel needs it contiguous")
        tensors.append(tensor)
    return tensors
