"""Residual branches with a recurrence: Mamba-2, delta rules, short convolutions. Shapes: T tokens, M hidden size."""

import math

from torch import Tensor

from bateleur.mamba import Mixer, Recurrence, Rings, gated_rms_norm
from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.mlp import ResidualBranch, gate
from bateleur.runner.models.norm import gated_norm_over_ranks
from bateleur.runner.models.spec import DeltaLayer, MambaLayer, ShortConvLayer


class Recurrent(ResidualBranch):
    """A residual branch with a convolution and a recurrence (`Mixer`) between its projections."""

    def __init__(
        self, state: Recurrence, like: Tensor, index: int, params: tuple[Tensor, ...], *, conv_bias: bool = False
    ) -> None:
        """like: tensor with dtype and device. index: layer index in the state pool. params: recurrence parameters."""
        self._index = index
        conv = like.new_empty(state.conv_dim, state.conv_width)
        self.mixer = Mixer(state, conv, like.new_empty(state.conv_dim) if conv_bias else None, params)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name, including the recurrence's parameters (A holds -exp(A_log))."""
        mixer = self.mixer
        names = [each.name for each in mixer.spec.parameters]
        found = super().weights() | {"conv": mixer.conv_weight, **dict(zip(names, mixer.params, strict=True))}
        return found if mixer.conv_bias is None else found | {"conv_bias": mixer.conv_bias}

    def mix(self, step: LayerStep, channels_TC: Tensor, *gates: Tensor) -> Tensor:
        """Return the recurrence's outputs (T, *output_shape), and advance its states.

        channels_TC: inputs of the convolution. gates: inputs of the recurrence per token, such as dt, beta or decay.
        In a step of piecewise CUDA graphs, decodes are captured and prompts run eagerly.
        """
        execution, context = step.execution, step.execution.state
        assert context.mamba is not None
        pieces = context.mamba.piecewise_decodes
        if pieces is None:
            return execution.eager(self._mix, channels_TC, *gates)
        y = self.mixer.decode(channels_TC, gates, pieces, *self._kept(context))
        return execution.eager(self._scan, y, channels_TC, *gates)

    def _mix(self, context: StepContext, channels_TC: Tensor, *gates: Tensor) -> Tensor:
        assert context.mamba_batch is not None
        return self.mixer.mix(channels_TC, gates, context.mamba_batch, *self._kept(context))

    def _scan(self, context: StepContext, y: Tensor, channels_TC: Tensor, *gates: Tensor) -> Tensor:
        assert context.mamba_batch is not None
        return self.mixer.prefill_into(y, channels_TC, gates, context.mamba_batch, *self._kept(context))

    def _kept(self, context: StepContext) -> tuple[tuple[Tensor, Tensor | None], Rings | None]:
        return context.states[self._index], context.rings[self._index]


class Mamba(Recurrent):
    """Mamba-2 between two projections. The first one computes z | x B C | dt, and z gates the norm of the output."""

    def __init__(self, spec: MambaLayer, like: Tensor, index: int, params: tuple[Tensor, ...]) -> None:
        """like: see `ResidualBranch`. index: layer index in the state pool. params: A, D, dt_bias."""
        state, hidden = spec.state, like.shape[1]
        super().__init__(state, like, index, params, conv_bias=spec.conv_bias)
        self.spec = spec
        self._parts = [state.inner_size, state.conv_dim, state.num_heads]
        self.in_proj = empty_projection(sum(self._parts), hidden, like, bias=spec.proj_bias)
        self.norm = None if spec.norm == "gate only" else like.new_empty(state.inner_size)
        self.out_proj = empty_projection(hidden, state.inner_size, like, bias=spec.proj_bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance the states of all requests. Decodes precede prompts in x."""
        spec, first = self.spec, self.spec.norm == "norm first"
        gate_TI, xbc_TC, dt_TH = self.in_proj(x_TM, step.adapters).split_with_sizes(self._parts, -1)
        y_TI = self.mix(step, xbc_TC, dt_TH).flatten(1)
        if self.norm is None:
            y_TI = gate(y_TI, gate_TI, "silu")
        elif spec.of_groups is not None:
            y_TI = gated_norm_over_ranks(y_TI, gate_TI, self.norm, spec.of_groups, spec.norm_eps, first, step.ranks)
        else:
            y_TI = gated_rms_norm(y_TI, gate_TI, self.norm, spec.state.num_groups, spec.norm_eps, first)
        return self.out_proj(y_TI, step.adapters)


class Delta(Recurrent):
    """Gated delta net or Kimi delta attention between an input and an output projection.

    The input projection computes q k v | gate | b (beta) | a (decay). Then follow the convolution, the recurrence, the
    norm of every head and the gate. With a rank R, gate and a are low-rank: R numbers each, projected a second time.
    """

    def __init__(self, spec: DeltaLayer, like: Tensor, index: int, params: tuple[Tensor, ...]) -> None:
        """like: see `ResidualBranch`. index: layer index in the state pool. params: A, dt_bias."""
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

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance the states of all requests. Decodes precede prompts in x."""
        spec, state = self.spec, self.spec.state
        qkv_TC, gate_TI, b_TH, a = self.in_proj(x_TM, step.adapters).split_with_sizes(self._parts, -1)
        if spec.rank is not None:
            gate_TI, a = self.gate_proj(gate_TI, step.adapters), self.decay_proj(a, step.adapters)
        # Not for decays per head: torch would give a view of one token its own stride.
        if len(state.gates[0].shape) > 1:
            a = a.unflatten(1, state.gates[0].shape)
        y_TI, heads = self.mix(step, qkv_TC, a, b_TH).flatten(1), state.output_shape[0]
        y_TI = gated_rms_norm(y_TI, gate_TI, self.norm, heads, spec.norm_eps, True, spec.gate_activation)
        return self.out_proj(y_TI, step.adapters)


class GatedConv(Recurrent):
    """Short convolution `out_proj(C * conv(B * x))`; an input projection computes B | C | x."""

    def __init__(self, spec: ShortConvLayer, like: Tensor, index: int) -> None:
        width = spec.state.channels
        super().__init__(spec.state, like, index, (), conv_bias=spec.bias)
        self.spec = spec
        self.in_proj = empty_projection(3 * width, like.shape[1], like, bias=spec.bias)
        self.out_proj = empty_projection(like.shape[1], width, like, bias=spec.bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance all requests' conv windows. Decodes precede prompts in x."""
        B_TM, C_TM, inner_TM = self.in_proj(x_TM, step.adapters).chunk(3, -1)
        y_TM = self.mix(step, B_TM * inner_TM)
        return self.out_proj(C_TM * y_TM, step.adapters)
