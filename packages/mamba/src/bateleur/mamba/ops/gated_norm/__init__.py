"""The gated norm before a Mamba layer's last projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute


@operator(like="x")
def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Root-mean-square norm over each of `groups` equal parts of the channels of x * silu(z), times weight.

    x and z (T, inner), weight (inner,). Gate and norm in float32, cast to x's dtype, then the weight.
    """
    dtype = compute(x)
    y = F.silu(z.to(dtype)).mul_(x)
    parts = y.view(*y.shape[:-1], groups, -1)
    if y.device.type == "cpu":  # 1.2 to 1.3 times as fast as the fused norm there, up to 64 tokens of 512
        length = torch.linalg.vector_norm(parts, dim=-1, keepdim=True)
        parts.mul_(length.square_().div_(parts.shape[-1]).add_(eps).rsqrt_())
        return y.to(x.dtype).mul_(weight)
    return F.rms_norm(parts, parts.shape[-1:], None, eps).view(y.shape).to(x.dtype).mul_(weight)
