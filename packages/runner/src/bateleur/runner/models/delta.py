"""Residual branch of delta rules: gated delta nets and Kimi delta attention."""

from __future__ import annotations

import math

from torch import Tensor

from bateleur.mamba import gated_rms_norm
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.recurrent import Recurrent
from bateleur.runner.models.spec import DeltaLayer


class Delta(Recurrent):
    """Gated delta net or Kimi delta attention between an input and an output projection.

    The input projection computes q k v | gate | b (beta) | a (decay). Then follow the convolution, the recurrence, the
    norm of every head and the gate. With a rank R, gate and a are low-rank: R numbers each, projected a second time.
    """

    def __init__(self, spec: DeltaLayer, like: Tensor, index: int, params: tuple[Tensor, ...]) -> None:
        """like: tensor with hidden size, dtype, device. index: index in the state pool. params: A, dt_bias."""
        state, hidden, rank = spec.state, like.shape[1], spec.rank
        super().__init__(state, like, index, params)
        self.spec = spec
        decays, betas = (math.prod(each.shape) for each in state.gates)
        inner = math.prod(state.output_shape)
        self._parts = [state.conv_dim, rank or inner, betas, rank or decays]
        self.in_proj = empty_projection(sum(self._parts), hidden, like)
        if rank is not None:
            self.gate_proj = empty_projection(inner, rank, like)
            self.decay_proj = empty_projection(decays, rank, like)
        self.norm = like.new_empty(state.output_shape[-1])
        self.out_proj = empty_projection(hidden, inner, like)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name. The tensor of A holds -exp(A_log)."""
        return super().weights() | {"norm": self.norm}

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance the states of all requests. Decodes come before prompts."""
        spec, state = self.spec, self.spec.state
        qkv_TC, gate_TI, b_TH, a = self.in_proj(x_TM, step.adapters).split_with_sizes(self._parts, -1)
        if spec.rank is not None:
            gate_TI, a = self.gate_proj(gate_TI, step.adapters), self.decay_proj(a, step.adapters)
        # Not for decays per head: torch would give a view of one token its own stride.
        if len(state.gates[0].shape) > 1:
            a = a.unflatten(1, state.gates[0].shape)
        y_THP = self.mix(step, qkv_TC, a, b_TH)
        heads = state.output_shape[0]
        y_TI = gated_rms_norm(y_THP.flatten(1), gate_TI, self.norm, heads, spec.norm_eps, True, spec.gate_activation)
        return self.out_proj(y_TI, step.adapters)
