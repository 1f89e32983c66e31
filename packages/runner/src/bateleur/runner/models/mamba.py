"""Residual branch of Mamba-2."""

from __future__ import annotations

from torch import Tensor

from bateleur.mamba import gated_rms_norm
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.mlp import gate
from bateleur.runner.models.part_norm import gated_norm_over_ranks
from bateleur.runner.models.recurrent import Recurrent
from bateleur.runner.models.spec import MambaLayer


class Mamba(Recurrent):
    """Mamba-2 between an input and an output projection.

    The input projection computes z | x B C | dt. The mixer (convolution and recurrence) reads x B C and dt, and z gates
    the norm of its output.
    """

    def __init__(self, spec: MambaLayer, like: Tensor, index: int, params: tuple[Tensor, ...]) -> None:
        """like: tensor with hidden size, dtype, device. index: index in the state pool. params: A, D, dt_bias."""
        state, hidden = spec.state, like.shape[1]
        super().__init__(state, like, index, params, conv_bias=spec.conv_bias)
        self.spec = spec
        self._parts = [state.inner_size, state.conv_dim, state.num_heads]
        self.in_proj = empty_projection(sum(self._parts), hidden, like, bias=spec.proj_bias)
        self._norm_first = spec.norm == "norm first"
        self.norm = None if spec.norm == "gate only" else like.new_empty(state.inner_size)
        self.out_proj = empty_projection(hidden, state.inner_size, like, bias=spec.proj_bias)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name. The tensor of A holds -exp(A_log)."""
        return super().weights() | ({} if self.norm is None else {"norm": self.norm})

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance the states of all requests. Decodes come before prompts."""
        gate_TI, xbc_TC, dt_TH = self.in_proj(x_TM, step.adapters).split_with_sizes(self._parts, -1)
        y_THP = self.mix(step, xbc_TC, dt_TH)
        y_TI = y_THP.flatten(1)
        if self.norm is None:
            return self.out_proj(gate(y_TI, gate_TI, "silu"), step.adapters)
        groups, eps = self.spec.state.num_groups, self.spec.norm_eps
        if self.spec.of_groups is not None:
            y_TI = gated_norm_over_ranks(
                y_TI, gate_TI, self.norm, self.spec.of_groups, eps, self._norm_first, step.ranks
            )
        else:
            y_TI = gated_rms_norm(y_TI, gate_TI, self.norm, groups, eps, self._norm_first)
        return self.out_proj(y_TI, step.adapters)
