"""The specification: group by group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.shared.reference import compute


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate, then normalise each group of channels by its root mean square, then scale."""
    y = x.to(compute(x)) * F.silu(z.to(compute(x)))
    parts = [part / torch.sqrt(part.pow(2).mean(-1, keepdim=True) + eps) for part in y.chunk(groups, dim=-1)]
    return torch.cat(parts, -1).to(x.dtype) * weight
