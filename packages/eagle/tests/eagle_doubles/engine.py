"""The toy engine with graphs, and what a drafter over caches must come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphManager,
    Execution,
    GraphBackend,
    Phase,
    ReplayChecks,
    StagedBatch,
    UnpaddedBatch,
)
from bateleur.eagle.conformance.toy_engine import DTYPE, ToyEngine, ToyRequest, ToyState
from bateleur.eagle.heads.layers import DenseAttend
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.metadata import BatchShape, BuildPhase, CommonAttentionMetadata, StepRows


class GraphEngine(ToyEngine):
    """Runs steps on graphs once they are captured; `num_graph_steps` counts them."""

    drafter: EagleSpeculator | None
    manager: CudaGraphManager[ToyState, tuple[Tensor, ...]] | None = None
    num_graph_steps = 0

    # --- a producer for the target's graphs -----------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Stagings so far."""
        return self.buffers.generation

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[ToyState]:
        """A dummy step of `key`."""
        inner = BuildPhase(phase.value)
        num_reqs = key.num_reqs or min(key.num_tokens, self.limits.max_num_reqs)
        longest = -(-key.num_tokens // num_reqs)
        shape = BatchShape(num_reqs, key.num_tokens, num_reqs, key.num_tokens, key.max_query_len or longest)
        bound = None if inner is BuildPhase.RUN else self.limits.max_model_len
        return self._staged(key, self.buffers.dummy(shape, context_len=1, max_seq_len=bound), inner)

    def addresses(self) -> Mapping[str, int]:
        """Buffers."""
        return self.buffers.addresses()

    def poison(self) -> None:
        """Spoil the buffers."""
        self.buffers.poison()

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[ToyState]:
        """Random rows that fit `key`, over random caches."""
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        length = key.uniform_query_len
        most = key.num_reqs or min(key.num_tokens, self.limits.max_num_reqs)
        num_reqs = int(rng.integers(1, most + 1))
        lens = np.full(num_reqs, length or 1, np.int32)
        if length is None:
            lens[-1] += rng.integers(0, min(key.num_tokens, self.limits.max_model_len - 1) - num_reqs + 1)
        rows = StepRows(
            query_lens=lens,
            num_computed_tokens=rng.integers(1, self.limits.max_model_len - lens + 1).astype(np.int32),
            is_prefilling=lens > (length or 1),
            token_ids=rng.integers(0, self.target.vocab_size, lens.sum()).astype(np.int32),
            block_tables=(self.tables[rng.permutation(len(self.tables))[:num_reqs]],),
        )
        for cache in (cache for pair in self.kv for cache in pair):
            cache[1:] = torch.randn(cache[1:].shape, generator=generator, dtype=DTYPE)
        padded = key.num_reqs or num_reqs
        shape = BatchShape(num_reqs, int(lens.sum()), padded, key.num_tokens, key.max_query_len or int(lens.max()))
        return self._staged(key, self.buffers.stage(rows, shape), BuildPhase.RUN)

    def capture(
        self, plan: CudagraphDispatcher, backend: GraphBackend, checks: ReplayChecks = ReplayChecks.PARANOID
    ) -> Any:
        """Capture the target; returns its states."""
        self.manager = CudaGraphManager(plan, backend, checks=checks)
        return self.manager.capture(self, self._body)

    def _staged(
        self, key: BatchExecutionDescriptor, batch: CommonAttentionMetadata, phase: BuildPhase
    ) -> StagedBatch[ToyState]:
        return self._proof(key, ToyState(batch, self.builder.build(batch, 0, phase)))

    def _proof(self, key: BatchExecutionDescriptor, state: ToyState) -> StagedBatch[ToyState]:
        assert state.attention is not None
        signature = None if key.num_reqs is None else self.builder.signature(state.attention)
        return StagedBatch(key, state, state.batch.generation, signature)

    def _shape(self, rows: StepRows) -> BatchShape:
        if self.manager is None:
            return super()._shape(rows)
        lens = rows.query_lens
        num_reqs, num_tokens, longest = len(lens), int(lens.sum()), int(lens.max())
        uniform = longest if (lens == longest).all() else None
        ask = UnpaddedBatch(num_reqs, num_tokens, uniform, longest, not rows.is_prefilling.any())
        self.key = key = self.manager.dispatcher.dispatch(ask, self.manager.ready).descriptor
        if key is None:
            return BatchShape.of(num_reqs, num_tokens, longest)
        reqs, promised = key.num_reqs or num_reqs, key.max_query_len or longest
        return BatchShape(num_reqs, num_tokens, reqs, key.num_tokens, promised)

    def _body(self, execution: Execution[ToyState]) -> tuple[Tensor, ...]:
        batch = execution.state.batch

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def run(state: ToyState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self._attend(state, layer, q, k, v)

            return execution.eager(run, q, k, v)

        return self.target.forward(batch.input_ids, batch.positions, attend)

    def _run(self, state: ToyState) -> tuple[Tensor, ...]:
        if self.key is None:
            return super()._run(state)
        assert self.manager is not None
        self.num_graph_steps += 1
        return self.manager.replay(self.key, self._proof(self.key, state))

    # --- oracles --------------------------------------------------------------------------------------------

    def from_scratch(self, request: ToyRequest, num_drafts: int) -> tuple[list[int], DenseAttend]:
        """Drafts behind what the target has computed, and the head's keys and values: no cache, no batch, no chain."""
        assert self.drafter is not None
        head: Any = self.drafter.head
        n = request.computed
        tokens = torch.tensor(request.tokens[: n + 1])
        outputs = self.target.forward(tokens[:n], torch.arange(n), DenseAttend())
        hidden = head.fuse(self.target.features(outputs, self.drafter.needs))
        ids, drafts = tokens[1:], []
        held = DenseAttend()
        head.forward(ids, hidden, torch.arange(n), held)
        for _ in range(num_drafts):
            h, recycled = head.forward(ids, hidden, torch.arange(len(ids)), DenseAttend())
            token = self.draw_draft(head, h[-1:], request, len(ids) + 1)
            drafts.append(token)
            ids = torch.cat((ids, torch.tensor([token])))
            hidden = torch.cat((hidden, recycled[-1:]))
        return drafts, held

    def draw_draft(self, head: Any, h: Tensor, request: ToyRequest, index: int) -> int:
        """The head's token of `index`, by brute force: the target's noise, restricted to the draft vocabulary."""
        logits = torch.full((self.target.vocab_size,), -torch.inf)
        ids = slice(None) if head.target_ids is None else head.target_ids
        logits[ids] = head.logits(h)[0].float()
        return self.draw(logits, request, index)

    def draft_cache(self, request: ToyRequest, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (count, Hkv, D) that the drafter holds of the request's leading positions."""
        assert self.drafter is not None
        position = torch.arange(count)
        blocks = torch.from_numpy(self.tables[request.row])[position // self.block_size].long()
        k, v = self.drafter.kv[layer]
        return k[blocks, position % self.block_size], v[blocks, position % self.block_size]
