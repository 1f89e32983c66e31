"""What stands between two looks at the residual stream: a norm, and the mixers that read it, one or several.

Shapes: T tokens of all requests in one row, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.runner.models.attention import Attention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.delta import Delta
from bateleur.runner.models.experts import Experts
from bateleur.runner.models.mamba import Mamba
from bateleur.runner.models.mlp import Mlp
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.spec import Layer, ParallelLayer, SingleLayer

Mixer = Attention | Mlp | Experts | Mamba | Delta


@dataclass(frozen=True, slots=True)
class Residual:
    """A layer of the spec: `h + sum(factor * mixer(norm(h)))`."""

    norm: RMSNorm
    parts: tuple[tuple[str, Mixer, float], ...]
    """Each mixer, what the names of its weights begin with, and the factor on what it returns."""

    @classmethod
    def of(
        cls, layer: Layer, build: Callable[[SingleLayer], Mixer], norm: RMSNorm, multiplier: float
    ) -> Residual:
        """`layer` with mixers that `build` makes. In a parallel layer the names of part 0 begin with `0.`."""
        if not isinstance(layer, ParallelLayer):
            return cls(norm, (("", build(layer), multiplier),))
        factors = enumerate(zip(layer.parts, layer.factors, strict=True))
        return cls(norm, tuple((f"{i}.", build(part), multiplier * factor) for i, (part, factor) in factors))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors to be loaded, and their names."""
        yield "input_norm", self.norm.weight
        for prefix, mixer, _ in self.parts:
            yield from ((prefix + name, weight) for name, weight in mixer.weights().items())

    def pack(self) -> None:
        """See `Projection.pack`."""
        for _, mixer, _ in self.parts:
            for projection in mixer.projections.values():
                projection.pack()

    def add_to(self, h_TM: Tensor, dtype: torch.dtype, step: LayerStep) -> None:
        """Add in place what the mixers make of the stream, which they see in `dtype`."""
        x_TM = self.norm(h_TM if h_TM.dtype == dtype else h_TM.to(dtype))
        for _, mixer, factor in self.parts:
            h_TM.add_(mixer.forward(x_TM, step), alpha=factor)
