"""How projection matrices lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised weight (rows, columns) for `F.linear`.

    In float32 on CPU it is stored by columns: the BLAS then reads it as the plain right-hand side of a product, which
    for one to a few tokens takes less time (`benchmarks/layout.py`). Elsewhere it is stored by rows.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.empty(columns, rows, dtype=dtype, device=device).t()
    return torch.empty(rows, columns, dtype=dtype, device=device)
