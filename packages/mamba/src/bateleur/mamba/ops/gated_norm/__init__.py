"""The gated norm before the last projection of a recurrent layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@operator(like="x", native="update")
def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    norm_first: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Root-mean-square norm over each of `groups` equal parts of the channels of x * act(z), times weight.

    norm_first: the norm is that of x alone, and weight and act(z) multiply it. x and z (T, inner); weight (inner,), or
    (inner / groups,), which all groups share. activation: "silu" or "sigmoid". All in float32, but the weight of a norm
    behind its gate multiplies what was cast to x's dtype.

    Raises ValueError for an unknown activation.
    """
    require_gate(activation)
    shape = (x.shape[0], groups, x.shape[1] // groups)
    gate, weight = _GATES[activation](z.to(compute(x))), weight.view(-1, shape[2])
    if norm_first:
        y = _normed(x.to(gate.dtype).view(shape), eps).mul_(weight)
        return gate.mul_(y.view(x.shape)).to(x.dtype)
    return _normed(gate.mul_(x).view(shape), eps).to(x.dtype).mul_(weight).view(x.shape)


def require_gate(activation: str) -> None:
    """Raise ValueError for an activation that no gate has."""
    if activation not in _GATES:
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'sigmoid'")


def _normed(parts: Tensor, eps: float) -> Tensor:
    """(T, groups, size) over its last axis."""
    if parts.device.type == "cpu":  # 1.2 to 1.3 times as fast as the fused norm there, up to 64 tokens of 512
        length: Tensor = torch.linalg.vector_norm(parts, dim=-1, keepdim=True)
        return parts * length.square_().div_(parts.shape[-1]).add_(eps).rsqrt_()
    return F.rms_norm(parts, parts.shape[-1:], None, eps)
