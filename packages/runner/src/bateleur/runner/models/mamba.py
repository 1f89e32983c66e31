"""The Mamba-2 branch.

Shapes: T tokens of all requests in one row, M hidden size, I inner size, C conv channels (I + 2GN), H heads, P their
size, G groups, N state size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba import Mixer, gated_rms_norm
from bateleur.runner.models.branch import Branch
from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.spec import MambaLayer


class Mamba(Branch):
    """Mamba-2 layer: projection to z | x B C | dt, the mixer over x B C and dt, gated norm, projection back."""

    def __init__(self, spec: MambaLayer, like: Tensor, index: int, params: tuple[Tensor, ...]) -> None:
        """`index` is the layer's entry in the state pool; params is where A, D and dt_bias are to be."""
        self.spec = spec
        self._index = index
        state, hidden = spec.state, like.shape[1]
        self._parts = [state.inner_size, state.conv_dim, state.num_heads]
        self.in_proj = empty_projection(sum(self._parts), hidden, like, bias=spec.proj_bias)
        conv = like.new_empty(state.conv_dim, state.conv_width)
        conv_bias = like.new_empty(state.conv_dim) if spec.conv_bias else None
        self.mixer = Mixer(state, conv, conv_bias, params)
        self.norm = None if spec.norm == "gate only" else like.new_empty(state.inner_size)
        self.out_proj = empty_projection(hidden, state.inner_size, like, bias=spec.proj_bias)

    def weights(self) -> dict[str, Tensor]:
        """Tensors to be loaded, by name; A is -exp(A_log)."""
        mixer = self.mixer
        found = super().weights() | {"conv": mixer.conv_weight}
        names = [each.name for each in mixer.spec.parameters]
        found |= dict(zip(names, mixer.params, strict=True))
        if self.norm is not None:
            found["norm"] = self.norm
        return found if mixer.conv_bias is None else found | {"conv_bias": mixer.conv_bias}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Advance every row's state by its tokens: (T, M). Decode rows come first, prompts follow."""
        gate_TI, xbc_TC, dt_TH = self.in_proj(x_TM).split(self._parts, -1)
        y_THP = step.execution.eager(self._mix, xbc_TC, dt_TH)
        return self.out_proj(self._gate(y_THP.flatten(1), gate_TI))

    def _gate(self, y_TI: Tensor, gate_TI: Tensor) -> Tensor:
        if self.norm is None:
            return F.silu(gate_TI).mul_(y_TI)
        groups = self.spec.state.num_groups
        return gated_rms_norm(y_TI, gate_TI, self.norm, groups, self.spec.norm_eps)

    def _mix(self, context: StepContext, xbc_TC: Tensor, dt_TH: Tensor) -> Tensor:
        """Everything that reads or writes states: (T, H, P)."""
        assert context.mamba_rows is not None
        states, rings = context.states[self._index], context.rings[self._index]
        return self.mixer.mix(xbc_TC, (dt_TH,), context.mamba_rows, states, rings)
