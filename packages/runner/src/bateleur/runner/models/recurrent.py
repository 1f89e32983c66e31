"""Base class of recurrent branches: convolution and recurrence (the mixer), and their weights."""

from __future__ import annotations

from torch import Tensor

from bateleur.mamba import Mixer, Recurrence, Rings
from bateleur.runner.models.branch import ResidualBranch
from bateleur.runner.models.context import LayerStep, StepContext


class Recurrent(ResidualBranch):
    """A residual branch with a mixer (convolution and recurrence) between its projections."""

    def __init__(
        self, state: Recurrence, like: Tensor, index: int, params: tuple[Tensor, ...], *, conv_bias: bool = False
    ) -> None:
        """like: tensor with dtype and device. index: index in the state pool. params: parameters of the recurrence."""
        self._index = index
        conv = like.new_empty(state.conv_dim, state.conv_width)
        self.mixer = Mixer(state, conv, like.new_empty(state.conv_dim) if conv_bias else None, params)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name, including the recurrence's parameters."""
        mixer = self.mixer
        names = [each.name for each in mixer.spec.parameters]
        found = super().weights() | {"conv": mixer.conv_weight, **dict(zip(names, mixer.params, strict=True))}
        return found if mixer.conv_bias is None else found | {"conv_bias": mixer.conv_bias}

    def mix(self, step: LayerStep, channels_TC: Tensor, *gates: Tensor) -> Tensor:
        """Run convolution and recurrence, which read and write the requests' states: (T, *output_shape).

        In a piecewise CUDA graph, decodes are part of a captured piece, and prompts run eagerly between pieces.
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
        """Return the layer's conv windows and states, and its rings (inputs of the latest tokens)."""
        return context.states[self._index], context.rings[self._index]
