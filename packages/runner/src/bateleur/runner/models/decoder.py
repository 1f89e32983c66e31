"""The decoder: embedding, a stack of residual branches, final norm, logits.

Shapes: T tokens of all requests in one row, M hidden size, S rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.cudagraph.execution import Execution
from bateleur.mamba import MambaSpec
from bateleur.runner.models.context import Eager, LayerStep, StepContext
from bateleur.runner.models.layers import Attention, Mamba, Mlp
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.rope import RopeTable
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer, ModelSpec, RopeSpec

Mixer = Attention | Mlp | Mamba


class HybridDecoder:
    """A model of any mixture of attention, MLP and Mamba-2 branches, with its weights.

    A new decoder's weights are uninitialised memory; a checkpoint's loader fills them (`weights`). On the `meta`
    device it is a description of its weights that costs nothing.

    Args:
        spec: what to build.
        dtype: of weights, activations and logits before their conversion to float32. A, D and dt_bias of Mamba
            layers are float32 in any case.
        device: where the weights live.
    """

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self._output = Projection(self.embedding)
        if not spec.tie_word_embeddings:
            self._output = empty_projection(spec.vocab_size, spec.hidden_size, dtype, device)
        self._final_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device)
        self._ropes: dict[RopeSpec, RopeTable] = {}
        kinds = Counter(layer.state for layer in spec.layers if isinstance(layer, MambaLayer))
        self.decays = [
            torch.empty(count, state.num_heads, dtype=torch.float32, device=device)
            for state, count in kinds.items()
        ]
        """A (layers, H) of the Mamba layers of each shape: one tensor, for all of them are folded at once."""
        self._branches = self._build_branches(dict(zip(kinds, map(iter, self.decays), strict=True)))
        self._tables = tuple(self._ropes.values())

    def _build_branches(
        self, decays: Mapping[MambaSpec, Iterator[Tensor]]
    ) -> tuple[tuple[RMSNorm, Mixer], ...]:
        spec, dtype, device = self.spec, self.dtype, self.device
        branches: list[tuple[RMSNorm, Mixer]] = []
        num_attention = num_mamba = 0
        for layer in spec.layers:
            mixer: Mixer
            match layer:
                case AttentionLayer():
                    rope = self._rope_index(layer.rope)
                    mixer = Attention(layer, spec.hidden_size, num_attention, rope, dtype, device)
                    num_attention += 1
                case MambaLayer():
                    A = next(decays[layer.state])
                    mixer = Mamba(layer, spec.hidden_size, num_mamba, A, dtype, device)
                    num_mamba += 1
                case MlpLayer():
                    mixer = Mlp(layer, spec.hidden_size, dtype, device)
            branches.append((RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device), mixer))
        return tuple(branches)

    def _rope_index(self, rope: RopeSpec | None) -> int:
        if rope is None:
            return -1
        if rope not in self._ropes:
            self._ropes[rope] = RopeTable(rope, self.dtype, self.device)
        return list(self._ropes).index(rope)

    def weights(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint fills, by name: `embedding`, `layers.3.norm`, `layers.3.in_proj`, ..., `lm_head`.

        Layers count residual branches, in the order of `spec.layers`. Without `lm_head` if it is the embedding.
        """
        named = {"embedding": self.embedding}
        for i, (norm, mixer) in enumerate(self._branches):
            named[f"layers.{i}.input_norm"] = norm.weight
            named.update({f"layers.{i}.{name}": weight for name, weight in mixer.weights().items()})
        named["final_norm"] = self._final_norm.weight
        if self.lm_head is not self.embedding:
            named["lm_head"] = self.lm_head
        return named

    @property
    def lm_head(self) -> Tensor:
        """(V, M) output projection; the embedding itself if they are tied, and a copy once it is packed."""
        return self._output.weight

    @property
    def output(self) -> Projection:
        """The product with `lm_head`, before the logits are divided."""
        return self._output

    @property
    def final_norm(self) -> Tensor:
        """(M,) weight of the last norm."""
        return self._final_norm.weight

    def tie_lm_head(self) -> None:
        """Let the embedding serve as output projection, and drop the separate one."""
        self._output = Projection(self.embedding)

    def pack(self) -> None:
        """Pack the matrices (see `Projection.pack`): the weights are complete, and no graph will be recorded."""
        for projection in (
            *(each for _, mixer in self._branches for each in mixer.projections),
            self._output,
        ):
            projection.pack()

    def reserve_positions(self, num_positions: int) -> None:
        """Compute the rotary tables up to `num_positions` now, so that no later step allocates."""
        for table in self._tables:
            table.reserve(num_positions)

    def forward(
        self, input_ids: Tensor, positions: Tensor, ctx: StepContext, eager: Eager | None = None
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: (T,) int32 or int64, all requests in one row, decode rows first.
            positions: (T,) int64.
            ctx: metadata and caches; the caches are written.
            eager: how parts that read the metadata are called (see `Eager`); default: directly.

        Returns:
            (T, hidden_size) in the model's dtype.
        """
        return self.run(input_ids, positions, ctx, eager)[0]

    __call__ = forward

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        eager: Eager | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        """As `forward`, and after its result the residual stream at some boundaries between layers.

        taps: boundaries, as `bateleur.eagle.TargetNeeds` counts them: a layer is one of the checkpoint's, of one or
            two branches. Each gives (T, hidden_size) in the model's dtype, in the order asked for.
        """
        spec = self.spec
        step = self._shared(positions, ctx, eager)
        h_TM = F.embedding(input_ids, self.embedding)
        if spec.residual_in_fp32:
            h_TM = h_TM.float()
        if spec.embedding_multiplier != 1.0:
            h_TM = h_TM.mul_(spec.embedding_multiplier)
        scale = spec.residual_multiplier
        narrow = h_TM.dtype != self.dtype
        tapped = dict.fromkeys(tap * spec.branches_per_layer for tap in taps)
        seen: dict[int, Tensor] = {}
        for index, (norm, mixer) in enumerate(self._branches):
            if index in tapped:
                seen[index] = h_TM.to(self.dtype, copy=True)  # the stream itself is added to in place
            x_TM = norm(h_TM.to(self.dtype) if narrow else h_TM)
            h_TM.add_(mixer.forward(x_TM, step), alpha=scale)
        seen[len(self._branches)] = h_TM.to(self.dtype) if narrow else h_TM
        final = self._final_norm(seen[len(self._branches)])
        return (final, *(seen[tap * spec.branches_per_layer] for tap in taps))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (S, vocab_size) float32 of hidden states (S, hidden_size) that `forward` returned."""
        logits_SV = self._output(hidden).float()
        divisor = self.spec.logits_divisor
        return logits_SV if divisor == 1.0 else logits_SV.div_(divisor)

    def _shared(self, positions: Tensor, ctx: StepContext, eager: Eager | None) -> LayerStep:
        if ctx.attention is not None:
            self.reserve_positions(ctx.attention.max_seq_len)
        rotary = tuple(table.at(positions) for table in self._tables)
        run = eager or Execution(None, ctx).eager
        return LayerStep(run, rotary, ctx.backend.fuses_rotary)
