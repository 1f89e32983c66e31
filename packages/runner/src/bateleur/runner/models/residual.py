"""A layer of the residual stream: a norm and one or several branches (attention, MLP, ...) that read it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from bateleur.runner.models.attention import Attention, LatentAttention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.experts import Experts
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.mlp import Mlp
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.recurrent import Delta, GatedConv, Mamba
from bateleur.runner.models.spec import Layer, ParallelLayer, SingleLayer
from bateleur.runner.models.stream import ResidualStream

Mixer = Attention | LatentAttention | Mlp | Experts | Mamba | Delta | GatedConv


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """A layer of the residual stream: `h = h + sum(factor * branch(norm(h)))`. Branches are attention, MLP and others.

    With `norm_last` a branch adds `norm(branch(h))`; with `output_norm` it adds `output_norm(branch(norm(h)))`.
    """

    norm: RMSNorm
    parts: tuple[tuple[str, Mixer, float], ...]
    """Each mixer with the prefix of its weights' names and the factor on its output."""
    norm_last: bool = False
    output_norm: RMSNorm | None = None
    """Norm of the mixer's output; None for none."""

    @classmethod
    def of(
        cls, layer: Layer, build: Callable[[SingleLayer], Mixer], make_norm: Callable[[], RMSNorm], multiplier: float
    ) -> Self:
        """Build the layer with branches made by `build`. Weight names of part i of a parallel layer begin with `i.`."""
        if not isinstance(layer, ParallelLayer):
            return cls(make_norm(), (("", build(layer), multiplier),))
        factors = enumerate(zip(layer.parts, layer.factors, strict=True))
        parts = tuple((f"{i}.", build(part), multiplier * factor) for i, (part, factor) in factors)
        return cls(make_norm(), parts, layer.norm_last, make_norm() if layer.output_norm else None)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of weights to load."""
        yield "input_norm", self.norm.weight
        if self.output_norm is not None:
            yield "output_norm", self.output_norm.weight
        for prefix, mixer, _ in self.parts:
            yield from ((prefix + name, weight) for name, weight in mixer.weights().items())

    @property
    def matrices(self) -> dict[str, Projection | GroupedProjection]:
        """Projections of all residual branches of the layer, by the names of their weights."""
        return {prefix + name: each for prefix, mixer, _ in self.parts for name, each in mixer.projections.items()}

    def warm_up(self, num_tokens: int) -> None:
        """Load the kernels of projections and experts for steps of up to `num_tokens` tokens."""
        for _, mixer, _ in self.parts:
            pairs = num_tokens * mixer.spec.top_k if isinstance(mixer, Experts) else 0
            for projection in mixer.projections.values():
                projection.warm_up(pairs if isinstance(projection, GroupedProjection) else num_tokens)

    def add_to(self, stream: ResidualStream, step: LayerStep) -> None:
        """Run the layer's residual branches and add their outputs to the residual stream."""
        x_TM = stream.read() if self.norm_last else stream.normed(self.norm)
        if not step.ranks.alone and len(self.parts) > 1 and not self.norm_last:
            stream.add(step.ranks.sum_(self._of_all(x_TM, step)), 1.0)
            return
        norm = self.norm if self.norm_last else self.output_norm
        for _, mixer, factor in self.parts:
            y_TM = step.ranks.sum_(mixer.forward(x_TM, step))
            if norm is not None:
                stream.add_normed(y_TM, norm, factor)
            else:
                stream.add(y_TM, factor)

    def _of_all(self, x_TM: Tensor, step: LayerStep) -> Tensor:
        """Return this rank's sum over all parallel branches, so that one all-reduce is enough."""
        (_, first, factor), *others = self.parts
        y_TM = first.forward(x_TM, step).mul(factor)
        for _, mixer, factor in others:
            y_TM.add_(mixer.forward(x_TM, step), alpha=factor)
        return y_TM
