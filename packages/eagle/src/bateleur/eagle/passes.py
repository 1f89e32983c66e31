"""The draft passes of a head, as functions that run eagerly or in a CUDA graph: the first one, and those after it (the
chain).

They read and write only buffers at fixed addresses, read no value on the host, and have static shapes.

Legend for shapes: n rows (requests) of a pass, H hidden size of the head, V draft vocabulary, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, Execution, StagedBatch
from bateleur.eagle.buffers import DraftBuffers, DraftCache
from bateleur.eagle.geometry import stage_next
from bateleur.eagle.heads.spec import Head, vocab_of
from bateleur.eagle.rejection_sampler import draw_draft
from bateleur.eagle.rules import Rule
from bateleur.eagle.sample import argmax
from bateleur.metadata import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    GraphSupport,
    PagedAttentionMetadata,
    Signature,
    ops,
)

_HOST_LENGTHS = {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"}
_Attention: TypeAlias = Callable[["DraftState", Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftState:
    """Batch and attention metadata of a draft pass.

    batch: only its sizes are read. The first pass has the target's batch, the others one token per row.
    metadata: attention metadata of the head's layers.
    sign: returns the host scalars of the metadata, which a FULL graph captures.
    greedy: no row needs noise. Only eager passes read it, because a graph serves any rows.
    work: work list of the pass that runs, see `AttentionBackend.build_work_list`; None between passes.
    """

    batch: CommonAttentionMetadata
    metadata: PagedAttentionMetadata
    sign: Callable[[PagedAttentionMetadata], Signature]
    greedy: bool = False
    work: Tensor | None = None

    def staged(self, key: BatchExecutionDescriptor) -> StagedBatch[DraftState]:
        """Wrap this state as staged for graph `key`, with the host scalars of the metadata if the graph is FULL."""
        signature = self.sign(self.metadata) if key.mode is CudaGraphMode.FULL else None
        return StagedBatch(key, self, self.batch.generation, signature)


@dataclass(frozen=True, slots=True)
class ProposalPasses:
    """Metadata of the passes of a proposal: the first one, and those after it (None for fewer than two drafts)."""

    first: DraftState
    chain: DraftState | None

    @property
    def signature(self) -> Signature:
        """Host scalars of the metadata of all passes."""
        parts = {"first": self.first, "chain": self.chain}
        return Signature.join(**{name: each.sign(each.metadata) for name, each in parts.items() if each is not None})


class DraftPasses:
    """Runs the draft passes of a head over its paged KV caches.

    refresh: function that updates attention metadata for the next pass, on the device; None: each pass needs a build.
    rule: acceptance rule of the drafts, which determines the noise that they are sampled with.
    """

    def __init__(
        self,
        head: Head,
        cache: DraftCache,
        backend: AttentionBackend,
        inputs: DraftBuffers,
        refresh: Callable[[Any], object] | None,
        rule: Rule,
    ) -> None:
        self._head, self._inputs, self.refresh, self._rule = head, inputs, refresh, rule
        self._backend, self._block_size = backend, cache.blocks.block_size
        self.vocab = vocab_of(head, inputs.device)
        scales = cache.kv_scales or [None] * len(cache.kv)
        window = head.spec.sliding_window
        self._layers = [_attention(backend, *each, window) for each in zip(cache.kv, scales, strict=True)]
        self._store = _storing(cache.kv[-1], scales[-1])
        self._first_cache = cache.kv[0]
        self._in_pieces = backend.tolerates_loose_bounds

    def first(self, execution: Execution[DraftState]) -> Tensor:
        """Run the first pass on all tokens of the target's step, and stage the next pass. Returns (n,) int64 drafts."""
        return self._pass(execution, self._inputs.last_index[: self._num_rows(execution)])

    def store_kv(self, execution: Execution[DraftState]) -> None:
        """Run the head on the target's step only to store keys and values. No draft is sampled.

        So the last layer stores its keys and values, but computes no attention.
        """
        self._forward(execution, self._inputs.last_index[:0], [*self._layers[:-1], self._store])

    def chain(self, execution: Execution[DraftState]) -> Tensor:
        """Run the staged draft pass and stage the next one; returns the (n,) int64 drafts of the last pass.

        With a variant `(k,)` in the key, run all k - 1 passes after the first one, with metadata refreshed before each.
        """
        variant = () if execution.key is None else execution.key.variant
        if not variant:
            return self._pass(execution)
        assert self.refresh is not None
        token_n = self._inputs.tokens[: execution.state.batch.num_tokens, 0]
        for _ in range(int(variant[0]) - 1):
            self.refresh(execution.state.metadata)
            token_n = self._pass(execution)
        return token_n

    def _pass(self, execution: Execution[DraftState], rows: Tensor | None = None) -> Tensor:
        """Run the head, sample drafts and stage the next pass; returns the drafts, (n,) int64.

        rows: in the first pass, indices of the tokens whose output is sampled.
        """
        x = self._inputs
        h_nH, recycled_nH = self._forward(execution, rows, self._layers)
        token_n = self._draw(execution, h_nH)
        x.hidden[: len(token_n)] = recycled_nH
        stage_next(x, token_n, x.block_table, self._block_size, first=rows is not None)
        return token_n

    def _forward(
        self, execution: Execution[DraftState], rows: Tensor | None, layers: Sequence[_Attention]
    ) -> tuple[Tensor, Tensor]:
        x, state = self._inputs, execution.state
        count = state.batch.num_tokens
        if self._in_pieces and layers[0] is not self._store:
            spec, caches = self._head.spec, self._first_cache
            work = self._backend.build_work_list(
                state.metadata, caches, spec.num_heads, spec.sliding_window, x.hidden.dtype
            )
            state = replace(state, work=work)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self._in_pieces:  # kernels that ignore host bounds
                return layers[layer](state, q, k, v)
            return execution.eager(layers[layer], q, k, v)

        return self._head.forward(x.input_ids[:count], x.hidden[:count], x.positions[:count], attend, rows)

    def _num_rows(self, execution: Execution[DraftState]) -> int:
        """Return how many requests get a draft; the most possible in a piecewise graph, which only pads tokens."""
        if execution.key is None:
            return execution.state.batch.num_actual_reqs
        if execution.key.num_reqs is None:
            return min(execution.key.num_tokens, len(self._inputs.seeds))
        return execution.key.num_reqs

    def _draw(self, execution: Execution[DraftState], h_nH: Tensor) -> Tensor:
        """Sample drafts with the noise of the acceptance rule, and keep the logits if the rule needs them.

        Returns (n,) int64 target ids, -1 for none. Under `Rule.COUPLED`, the target samples with the same noise at the
        same request and position.
        """
        logits_nV = self._head.logits(h_nH)
        if execution.key is None and execution.state.greedy:
            drawn = argmax(logits_nV, self.vocab.shard)
        else:
            x, num_rows = self._inputs, len(h_nH)
            if x.logits is not None:  # logits of greedy rows are never read
                x.logits.keep(logits_nV, x.step)
            drawn = draw_draft(
                logits_nV,
                x.temperature[:num_rows],
                x.seeds[:num_rows],
                x.token_positions[:num_rows],
                rule=self._rule,
                draft_index=x.step.expand(num_rows),
                vocab=self.vocab,
            )
        token_n = drawn.token_ids
        if self._head.target_ids is not None:
            token_n = self._head.target_ids.index_select(0, token_n)
        return token_n.masked_fill(drawn.bad, -1)


def _storing(kv: tuple[Tensor, Tensor], kv_scales: Tensor | None) -> _Attention:
    """Return an attention function that only stores keys and values; its output is not used."""

    def store(state: DraftState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.write_kv(k, v, *kv, state.metadata.slot_mapping, kv_scales)
        return torch.zeros_like(q)

    return store


def _attention(
    backend: AttentionBackend, kv: tuple[Tensor, Tensor], kv_scales: Tensor | None, sliding_window: int | None
) -> _Attention:
    """Return the attention of one layer, as a function that a piecewise graph can run eagerly between its pieces."""

    def draft_attention(state: DraftState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        return backend.attend(q, k, v, kv, state.metadata, scale, sliding_window, work=state.work, kv_scales=kv_scales)

    return draft_attention


def refresh_of(builder: AttentionMetadataBuilder[Any]) -> Callable[[Any], object] | None:
    """Return a function that updates metadata of `builder` from one draft pass to the next, or None.

    A builder may provide `refresh(metadata)`, which works on the device, in place, and can be captured. Metadata that
    consists only of views of the batch needs no update: its builder owns no buffer and reads no length on the host.
    None means that each pass needs a build, and no graph can hold several passes.
    """
    refresh: Callable[[Any], object] | None = getattr(builder, "refresh", None)
    if refresh is None and not (builder.addresses() or builder.reads & _HOST_LENGTHS):
        return lambda metadata: None
    return refresh


def refreshes_in_graph(builder: AttentionMetadataBuilder[Any]) -> bool:
    """Whether metadata of `builder` can be refreshed inside a graph, so that one graph can hold a whole proposal."""
    return refresh_of(builder) is not None and builder.graph_support >= GraphSupport.SINGLE_TOKEN
