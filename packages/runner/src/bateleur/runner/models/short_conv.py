"""Residual branch of LFM2's short convolution. Shapes: T tokens of all requests, M hidden size."""

from __future__ import annotations

from torch import Tensor

from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.matrix import empty_projection
from bateleur.runner.models.recurrent import Recurrent
from bateleur.runner.models.spec import ShortConvLayer


class GatedConv(Recurrent):
    """Short convolution `out_proj(C * conv(B * x))`; an input projection computes B | C | x."""

    def __init__(self, spec: ShortConvLayer, like: Tensor, index: int) -> None:
        """index: index of the layer's states in the state pool. like: tensor with the hidden size, dtype and device."""
        width = spec.state.channels
        super().__init__(spec.state, like, index, (), conv_bias=spec.bias)
        self.spec = spec
        self.in_proj = empty_projection(3 * width, like.shape[1], like, bias=spec.bias)
        self.out_proj = empty_projection(like.shape[1], width, like, bias=spec.bias)

    def forward(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return the branch's output (T, M), and advance all requests' conv windows. Decodes come before prompts."""
        B_TM, C_TM, inner_TM = self.in_proj(x_TM, step.adapters).chunk(3, -1)
        y_TM = self.mix(step, B_TM * inner_TM)
        return self.out_proj(C_TM * y_TM, step.adapters)
