"""The decoder: embedding, a stack of residual branches, final norm, logits.

Shapes: T tokens of all requests, M hidden size, S hidden states that need logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.cudagraph.execution import Execution
from bateleur.runner.distributed.expert_parallel import ExpertParallel
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.models.context import LayerStep, StepContext
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.lora import is_adaptable
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.residual import ResidualStream, build_layers
from bateleur.runner.models.rope import RopeSpec, RopeTable
from bateleur.runner.models.sharding import shard_experts, shard_model
from bateleur.runner.models.spec import ModelSpec


class HybridDecoder:
    """A model of attention, MLP, experts and recurrent branches, with its weights.

    Weights of a new decoder are uninitialised; the checkpoint loader fills them (`weights`). On the `meta` device it
    only describes its weights.

    spec: layers and sizes of the model.
    dtype: dtype of weights, activations and logits (before conversion to float32). Parameters of recurrences and
    routers are float32 in any case.
    device: device of the weights.
    ranks: tensor-parallel ranks, see `shard_model`; `self.spec` is this rank's part.
    data_ranks: data-parallel ranks that share experts, see `shard_experts`; not together with `ranks`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ALONE,
        data_ranks: Ranks = ALONE,
    ) -> None:
        assert ranks.alone or data_ranks.alone
        device = torch.device(device)
        self.exchange = None if data_ranks.alone else ExpertParallel(data_ranks)
        """Exchanges tokens of experts with other ranks; None if all experts are here."""
        spec, self.share = shard_model(spec, ranks) if data_ranks.alone else shard_experts(spec, data_ranks)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self._tokens = ranks.about(spec.vocab_size)
        self.shard = ranks.vocab_shard(spec.vocab_size)
        """This rank's part of the vocabulary, for which it computes `logits`; None for the whole vocabulary."""
        self._multiplier = spec.embedding_multiplier
        if spec.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=dtype).item()
        rows = self._tokens[1] - self._tokens[0]
        self.embedding = torch.empty(rows, spec.hidden_size, dtype=dtype, device=device)
        self.output = Projection(self.embedding)
        """The product with `lm_head`, before the logits are divided."""
        if not spec.tie_word_embeddings:
            self.output = empty_projection(rows, spec.hidden_size, self.embedding)
        self._final_norm = RMSNorm(spec.hidden_size, spec.norm_eps, self.embedding, exact=spec.exact_norms)
        ropes = {layer.rope for layer in spec.attention}
        self._tables = {rope: RopeTable(rope, dtype, device) for rope in ropes if rope is not None}
        kinds_of_attention = [
            (each.num_heads, each.num_kv_heads, each.head_dim, each.sliding_window) for each in spec.attention
        ]
        self._first_of_kind = [kinds_of_attention.index(kind) for kind in kinds_of_attention]
        """For each attention layer, the index of the first layer with equal heads and window."""
        kinds = Counter(layer.state for layer in spec.recurrent)
        self.recurrence_parameters = [
            tuple(torch.empty(n, *each.shape, dtype=each.dtype, device=device) for each in state.parameters)
            for state, n in kinds.items()
        ]
        """(layers, *shape) for each parameter of each recurrence: stacked, because all layers are folded at once."""
        by_layer = (zip(*stacks, strict=True) for stacks in self.recurrence_parameters)
        params = dict(zip(kinds, by_layer, strict=True))
        self._residuals = build_layers(spec, self.embedding, list(self._tables), params, self.exchange)

    @property
    def peers(self) -> Ranks:
        """All ranks that take part in a forward pass: tensor-parallel ranks, or ranks that share experts."""
        return self.ranks if self.exchange is None else self.exchange.ranks

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint fills, by name: `embedding`, `layers.3.norm`, `layers.3.in_proj`, ...

        The layer number counts residual branches in the order of `spec.layers`. Parts of a parallel layer have a second
        number (`layers.3.1.in_proj`). `lm_head` is missing if the embedding is the output projection.
        """
        named = {"embedding": self.embedding}
        for residual in self._residuals:
            named |= residual.weights()
        named["final_norm"] = self._final_norm.weight
        return named if self.ties_lm_head else named | self.output.tensors("lm_head")

    @property
    def matrices(self) -> dict[str, Projection | GroupedProjection]:
        """Projections of all layers, and `lm_head` unless tied to the embedding, by the names of their weights."""
        named = {name: each for residual in self._residuals for name, each in residual.matrices.items()}
        return named if self.ties_lm_head else named | {"lm_head": self.output}

    @property
    def ties_lm_head(self) -> bool:
        """Whether the embedding is the output projection."""
        return self.output.stored is self.embedding

    @property
    def lm_head(self) -> Tensor:
        """Weight (V, M) of the output projection: the embedding itself if tied, a copy if packed or quantised."""
        return self.output.weight

    def tie_lm_head(self) -> None:
        """Use the embedding as output projection, and free the separate one."""
        self.output = Projection(self.embedding)

    @property
    def projections(self) -> list[Projection | GroupedProjection]:
        """The projections of all layers, and the output projection, also if it is tied to the embedding."""
        return list({**self.matrices, "lm_head": self.output}.values())

    @property
    def adaptable_projections(self) -> dict[str, Projection]:
        """Projections that a LoRA adapter may change, by the names of their weights."""
        named = self.matrices.items()
        return {name: each for name, each in named if isinstance(each, Projection) and is_adaptable(name)}

    def pack(self, *, recorded: bool = False) -> None:
        """Store the loaded matrices in layouts with faster CPU products. Matrices on a GPU stay as they are.

        recorded: whether graphs will be captured over the model; on a CPU, the backend "recorded" emulates CUDA graphs.
        Layouts that such graphs do not support are then not used, see `Projection.pack` and `GroupedProjection.pack`.
        """
        for projection in self.projections:
            projection.pack(recorded=recorded)

    def warm_up(self, num_tokens: int) -> None:
        """Load kernels for steps of up to `num_tokens` tokens, because graph capture launches only smaller steps."""
        for residual in self._residuals:
            residual.warm_up(num_tokens)
        self.output.warm_up(num_tokens)

    def rotary_table(self, rope: RopeSpec) -> RopeTable:
        """Return the cosine and sine table of a rotary embedding. It is a new table if no layer uses this embedding."""
        table = self._tables.get(rope)
        return RopeTable(rope, self.dtype, self.device) if table is None else table

    def reserve_positions(self, num_positions: int) -> None:
        """Compute all rotary tables up to `num_positions`, so that no later step allocates memory for them."""
        for table in self._tables.values():
            table.reserve(num_positions)

    def set_prompt_length(self, prompt_len: int) -> None:
        """Set the prompt length for rotary frequencies that depend on it, see `ModelSpec.rope_length`."""
        for table in self._tables.values():
            table.set_prompt_length(prompt_len)

    def run(self, execution: Execution[StepContext], taps: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Run a step. Returns final hidden states and the residual stream at `taps`, (T, hidden_size) each.

        execution: the step, whose caches are written. taps: layers of the checkpoint (`branches_per_layer` branches
        each) whose input is returned; the number of layers stands for the last one's output. All results have the
        model's dtype.
        """
        spec = self.spec
        context = execution.state
        if context.attention is not None:
            self.reserve_positions(context.attention.max_seq_len)
        positions = context.batch.positions
        rotary = tuple(table.at(positions) for table in self._tables.values())
        step = LayerStep(
            execution, rotary, ranks=self.ranks, work=self._divide_attention(context), adapters=context.adapters
        )
        h_TM = self.embed(context.batch.input_ids)
        if spec.residual_in_fp32:
            h_TM = h_TM.float()
        if self._multiplier != 1.0:
            h_TM = h_TM.mul_(self._multiplier)
        stream = ResidualStream(h_TM, self.dtype)
        tapped = dict.fromkeys(tap * spec.branches_per_layer for tap in taps)
        seen: dict[int, Tensor] = {}
        for index, residual in enumerate(self._residuals):
            if index not in tapped:
                residual.add_to(stream, step)
                continue
            stream.keep()
            residual.add_to(stream, step)
            seen[index] = stream.kept
        final = stream.normed(self._final_norm)
        seen[len(self._residuals)] = stream.read()
        return (final, *(seen[tap * spec.branches_per_layer] for tap in taps))

    def _divide_attention(self, context: StepContext) -> tuple[Tensor | None, ...]:
        """Return the attention work lists for `LayerStep.work`. Layers with equal heads and windows share a list."""
        backend, meta = context.backend, context.attention
        if meta is None or not backend.tolerates_loose_bounds:
            return ()
        layers = self.spec.attention
        made = {
            first: backend.build_work_list(
                meta, context.kv[first], layers[first].num_heads, layers[first].sliding_window, self.dtype
            )
            for first in dict.fromkeys(self._first_of_kind)
        }
        return tuple(made[first] for first in self._first_of_kind)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings (T, hidden_size) of token ids (T,). An all-reduce sums the parts of several ranks."""
        if self.ranks.alone:
            return F.embedding(input_ids, self.embedding)
        first, end = self._tokens
        absent_T = (input_ids < first) | (input_ids >= end)
        rows_TM = F.embedding((input_ids - first).masked_fill(absent_T, 0), self.embedding)
        return self.ranks.sum_(rows_TM.masked_fill_(absent_T.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (S, V) float32 of hidden states (S, hidden_size). V: the vocabulary, or this rank's shard."""
        logits_SV = self.output(hidden).float()
        divisor = self.spec.logits_divisor
        return logits_SV if divisor == 1.0 else logits_SV.div_(divisor)
