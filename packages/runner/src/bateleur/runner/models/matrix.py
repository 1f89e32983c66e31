"""Projections whose weights a checkpoint will fill, and how they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.eagle.heads.projection import Projection


def empty_projection(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, bias: bool = False
) -> Projection:
    """A projection of uninitialised memory."""
    added = torch.empty(rows, dtype=dtype, device=device) if bias else None
    return Projection(_empty_matrix(rows, columns, dtype, device), added)


def _empty_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised weight (rows, columns).

    In float32 on CPU it is stored by columns: the BLAS then reads it as the plain right-hand side of a product, which
    for one to a few tokens takes less time (`benchmarks/layout.py`): those matrices stay so that are too small to be
    packed. Elsewhere it is stored by rows.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.empty(columns, rows, dtype=dtype, device=device).t()
    return torch.empty(rows, columns, dtype=dtype, device=device)
