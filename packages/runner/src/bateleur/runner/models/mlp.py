"""The base class of residual branches, and the feed-forward branch. Shapes: T tokens, M hidden and F inner size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.operators import operator
from bateleur.runner.models.spec import ExpertsLayer, MlpLayer

_ALPHA, _LIMIT = 1.702, 7.0
"""Of `clamped_swiglu`."""


class ResidualBranch:
    """A residual branch: the computation between the norm of the residual stream and the sum with it.

    Constructors take a tensor `like` (any, M). The branch gets its width M, dtype and device. Branches are plain
    classes: `nn.Module` looks parameters up in a second dictionary and wraps every call, and nothing is trained here.
    """

    @property
    def projections(self) -> dict[str, Projection | GroupedProjection]:
        """Projections of the branch by the names of their weights."""
        kinds = Projection, GroupedProjection
        return {name: value for name, value in vars(self).items() if isinstance(value, kinds)}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name: public tensor attributes, and tensors of the projections."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name[0] != "_"}
        for name, projection in self.projections.items():
            found |= projection.tensors(name)
            if projection.bias is not None:
                found[name.replace("proj", "bias")] = projection.bias
        return found


class Mlp(ResidualBranch):
    """Feed-forward branch. One projection computes gate (the upper rows) and up."""

    def __init__(self, spec: MlpLayer, like: Tensor) -> None:
        self.spec = spec
        hidden, inner = like.shape[1], spec.intermediate_size
        self.up_proj = empty_projection(2 * inner if spec.gated else inner, hidden, like, bias=spec.bias)
        self.down_proj = empty_projection(hidden, inner, like, bias=spec.bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return `down(act(up(x)))`, or `down(act(gate(x)) * up(x))` if gated: (T, M)."""
        return self.down_proj(activate(self.up_proj(x_TM, step.adapters), self.spec), step.adapters)


def activate(gate_up: Tensor, spec: MlpLayer | ExpertsLayer) -> Tensor:
    """Return activations (T, F) of gate_up (T, F), or if `spec.gated` of (T, 2F), with the gate in the left half."""
    return activation(gate_up, spec.intermediate_size, spec.activation, spec.gated)


@operator("activation", lambda gate_up, size, name, gated: gate_up.new_empty(gate_up.shape[0], size), native="rows")
def activation(gate_up: Tensor, size: int, name: str, gated: bool) -> Tensor:
    """Return `act(gate_up)` (T, size), or if gated `act(gate) * up`, with the gate in the left half of gate_up.

    gate_up: (T, size), or if gated (T, 2 size). name: the activation act, one of `Activation`.
    """
    inner_TF = gate_up[:, :size] if gated else gate_up
    if name == "clamped_swiglu":
        exact = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        gate_TF, up_TF = exact[:, :size].clamp(max=_LIMIT), exact[:, size:].clamp(-_LIMIT, _LIMIT)
        return (gate_TF * (_ALPHA * gate_TF).sigmoid_()).mul_(up_TF.add_(1.0)).to(gate_up.dtype)
    if name == "silu":
        inner_TF = F.silu(inner_TF)
    else:
        inner_TF = F.gelu(inner_TF, approximate="tanh") if name == "gelu_tanh" else F.relu(inner_TF).square_()
    return inner_TF.mul_(gate_up[:, size:]) if gated else inner_TF


@operator("activation", lambda x, by, name: torch.empty_like(x, memory_format=torch.contiguous_format))
def gate(x: Tensor, by: Tensor, name: str) -> Tensor:
    """Return `x * act(by)` for x and `by` (T, F). name: the activation act, "silu" or "sigmoid"."""
    return (F.silu(by) if name == "silu" else by.sigmoid()).mul_(x)
