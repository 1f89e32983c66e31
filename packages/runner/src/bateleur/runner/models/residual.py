"""The residual stream of one pass, and its layers. Shapes: T tokens of all requests, M hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from bateleur.mamba import Recurrence
from bateleur.runner.distributed.expert_parallel import ExpertParallel
from bateleur.runner.models.attention import Attention, LatentAttention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.experts import Experts
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.mlp import Mlp
from bateleur.runner.models.norm import RMSNorm, Term
from bateleur.runner.models.recurrent import Delta, GatedConv, Mamba
from bateleur.runner.models.rope import RopeSpec
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    ShortConvLayer,
    SingleLayer,
)

Mixer = Attention | LatentAttention | Mlp | Experts | Mamba | Delta | GatedConv
_MOST_TERMS = 2
"""Maximum number of terms that one kernel adds before a norm."""


class ResidualStream:
    """The residual stream, and up to two branch outputs that are not yet added to it.

    An output is added when a norm reads the stream, so that on CUDA one kernel does both. Outputs are added in place,
    one by one, in the stream's dtype; layers read the stream in the model's dtype.
    """

    __slots__ = ("_dtype", "_h_TM", "_keep_next", "_pending", "_shared", "kept")

    def __init__(self, h_TM: Tensor, dtype: torch.dtype) -> None:
        """h_TM: initial residual stream (T, M), written in place. dtype: dtype in which layers read it."""
        self._h_TM, self._dtype = h_TM, dtype
        self._pending: list[Term] = []
        self._shared = False
        """Whether `kept` is `_h_TM` itself, so that the next sum must be a new tensor."""
        self._keep_next = False
        self.kept = h_TM
        """Residual stream (T, M) as the layer after `keep` reads it, before its norm. Later sums do not change it."""

    def add(self, y_TM: Tensor, factor: float) -> None:
        """Add `factor * y` to the residual stream. y must not be written to before the stream is next read."""
        if len(self._pending) == _MOST_TERMS:
            self.sum()
        self._pending.append((y_TM, factor))

    def add_normed(self, y_TM: Tensor, norm: RMSNorm, factor: float) -> None:
        """Add `factor * norm(y)` to the residual stream."""
        self.sum()
        if self._shared:
            self._h_TM, self._shared = self._h_TM.clone(), False
        norm.add_to(self._h_TM, y_TM, factor)

    def sum(self) -> Tensor:
        """Add all outputs, and return the residual stream (T, M) in its own dtype. Later sums may change the tensor."""
        for y_TM, factor in self._pending:
            if self._shared:
                self._h_TM, self._shared = self._h_TM.add(y_TM, alpha=factor), False
            else:
                self._h_TM.add_(y_TM, alpha=factor)
        self._pending.clear()
        return self._h_TM

    def keep(self) -> None:
        """Make the next `read` or `normed` store the stream that it reads, before the norm, in the attribute `kept`."""
        self._keep_next = True

    def read(self) -> Tensor:
        """Return the residual stream (T, M) in the layers' dtype. The result may share the stream's memory."""
        self.sum()
        return self._seen()

    def normed(self, norm: RMSNorm) -> Tensor:
        """Return the residual stream (T, M) after `norm`."""
        if not self._pending or self._shared:
            return norm(self.read())
        terms, self._pending = self._pending, []
        y_TM = norm.of_sum(self._h_TM, terms, self._dtype)
        if self._keep_next:
            self._seen()
        return y_TM

    def _seen(self) -> Tensor:
        seen_TM = self._h_TM.to(self._dtype)
        if self._keep_next:
            self.kept, self._keep_next, self._shared = seen_TM, False, self._shared or seen_TM is self._h_TM
        return seen_TM

    def select(self, tokens: Tensor) -> ResidualStream:
        """Return a stream with only some tokens. tokens: (N,) int64 indices."""
        return ResidualStream(self.sum().index_select(0, tokens), self._dtype)


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """A layer of the residual stream: `h = h + sum(factor * branch(norm(h)))`. Branches are attention, MLP and others.

    `parts`: prefix of weight names, branch, and factor. With `norm_last` a branch adds `norm(branch(h))`; with
    `output_norm` it adds `output_norm(branch(norm(h)))`.
    """

    name: str
    """Name of the layer in weight names, such as `layers.3`."""
    norm: RMSNorm
    parts: tuple[tuple[str, Mixer, float], ...]
    """Each mixer with the prefix of its weights' names (see `ModelSpec.prefixed`) and the factor on its output."""
    norm_last: bool = False
    output_norm: RMSNorm | None = None
    """Norm of the mixer's output; None for none."""

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name."""
        found = {f"{self.name}.input_norm": self.norm.weight}
        if self.output_norm is not None:
            found[f"{self.name}.output_norm"] = self.output_norm.weight
        for prefix, mixer, _ in self.parts:
            found |= {prefix + name: weight for name, weight in mixer.weights().items()}
        return found

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


def build_layers(
    spec: ModelSpec,
    like: Tensor,
    ropes: Sequence[RopeSpec],
    params: Mapping[Recurrence, Iterator[tuple[Tensor, ...]]],
    exchange: ExpertParallel | None = None,
) -> tuple[ResidualLayer, ...]:
    """Build the layers of `spec` with uninitialised weights.

    like: tensor (any, M); the layers get its width, dtype and device. ropes: rotary embeddings, in the order of
    `LayerStep.rotary`. params: tensors for the parameters of each recurrence, in the order of its layers.
    exchange: exchanges tokens with ranks that have other experts, see `Experts`.
    """
    num_attention, num_recurrent = count(), count()

    def build(layer: SingleLayer) -> Mixer:
        match layer:
            case LatentLayer():
                return LatentAttention(layer, like, next(num_attention))
            case AttentionLayer():
                rope = -1 if layer.rope is None else ropes.index(layer.rope)
                return Attention(layer, like, next(num_attention), rope)
            case MambaLayer():
                return Mamba(layer, like, next(num_recurrent), next(params[layer.state]))
            case DeltaLayer():
                return Delta(layer, like, next(num_recurrent), next(params[layer.state]))
            case ShortConvLayer():
                return GatedConv(layer, like, next(num_recurrent))
            case MlpLayer():
                return Mlp(layer, like)
            case ExpertsLayer():
                return Experts(layer, like, exchange)

    def norm() -> RMSNorm:
        return RMSNorm(spec.hidden_size, spec.norm_eps, like, exact=spec.exact_norms)

    def residual(i: int) -> ResidualLayer:
        layer = spec.layers[i]
        parallel = layer if isinstance(layer, ParallelLayer) else ParallelLayer((layer,))
        parts = zip(spec.prefixed(i), parallel.factors, strict=True)
        branches = tuple((prefix, build(part), spec.residual_multiplier * factor) for (prefix, part), factor in parts)
        output_norm = norm() if parallel.output_norm else None
        return ResidualLayer(f"layers.{i}", norm(), branches, parallel.norm_last, output_norm)

    return tuple(map(residual, range(len(spec.layers))))
