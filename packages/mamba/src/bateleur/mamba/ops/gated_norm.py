"""The gated RMS norm before the output projection of a recurrent layer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.slots import compute_dtype

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


@operator("gated_norm", fake="x", native="mamba2")
def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, norm_first: bool = False, activation: str = "silu"
) -> Tensor:
    """Root-mean-square norm of x * act(z) over each of `groups` equal parts of the channels, times weight.

    Args:
        x, z: (T, inner).
        weight: (inner,), or (inner / groups,) if all groups share it.
        groups: number of groups of channels.
        eps: added to the mean square.
        norm_first: compute norm(x) * weight * act(z) instead.
        activation: "silu" or "sigmoid".

    Computed in float32. Without `norm_first`, the normalized value is rounded to the dtype of x before it is multiplied
    with the weight. Returns (T, inner). Raises ValueError for an unknown activation.
    """
    require_gate(activation)
    parts = (x.shape[0], groups, x.shape[1] // groups)
    gate, weight = _GATES[activation](z.to(compute_dtype(x))), weight.view(-1, parts[2])
    values = x.to(gate.dtype) if norm_first else gate * x
    y = F.rms_norm(values.view(parts), parts[2:], None, eps)
    if norm_first:
        return ((y * weight).view(x.shape) * gate).to(x.dtype)
    return y.to(x.dtype).mul_(weight).view(x.shape)


def require_gate(activation: str) -> None:
    """Raise ValueError if the activation is neither "silu" nor "sigmoid"."""
    if activation not in _GATES:
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'sigmoid'")
