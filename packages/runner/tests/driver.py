"""Drives a decoder without an engine: real staging, real builders, caches full of NaN until they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from bateleur.cudagraph.execution import Execution
from bateleur.mamba import CacheLayout, MambaCacheMode, MambaMetadataBuilder, StatePool
from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, StepRows
from bateleur.metadata.backends import get_backend
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.models.spec import AttentionLayer


@dataclass
class Row:
    """One request: how far it has come, and its own blocks and state slot."""

    blocks: np.ndarray
    slot: int
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Driver:
    """Runs steps of (request, tokens) pairs; a request's logits gather in its row."""

    def __init__(self, model: HybridDecoder, max_model_len: int = 64, max_reqs: int = 6, block_size: int = 4) -> None:
        spec = model.spec
        self.model, self.max_model_len = model, max_model_len
        self.attention = spec.attention
        mamba = spec.recurrent
        self.backend = get_backend("auto", device=model.device, dtype=model.dtype, head_dim=16)
        blocks = -(-max_model_len // block_size)
        groups = [KVCacheGroup(block_size, blocks)] if self.attention else []
        self.kv = [self._poisoned(max_reqs * blocks + 1, block_size, layer) for layer in self.attention]
        self.pool = self.mamba_builder = None
        if mamba:
            layout = CacheLayout(MambaCacheMode.NONE, max_model_len, 0, max_model_len)
            groups.append(KVCacheGroup(layout.block_size, layout.columns(), has_slots=False))
            self.pool = StatePool(
                [replace(layer.state, conv_dtype=model.dtype) for layer in mamba], max_reqs + 1, model.device
            )
            for i in range(len(mamba)):
                for state in self.pool.layer(i)[: 1 + bool(mamba[i].state.state_shape)]:
                    state.fill_(float("nan"))
            chunk = min(layer.chunk_size for layer in mamba)
            self.mamba_builder = MambaMetadataBuilder(layout, chunk, 64, model.device)
        self.states = [self.pool.layer(i) for i in range(len(mamba))] if self.pool else []
        self.builder = self.backend.builder()
        limits = BatchLimits(max_reqs + 2, max_reqs * max_model_len, max_model_len)
        self.buffers = InputBuffers(limits, groups, model.device, self.builder.seq_len_fill)
        order = np.random.default_rng(7).permutation(np.arange(1, max_reqs * blocks + 1, dtype=np.int32))
        self.rows = [Row(order[i * blocks : (i + 1) * blocks], i + 1) for i in range(max_reqs)]

    def _poisoned(self, num_blocks: int, block_size: int, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        pair = [torch.full(shape, float("nan"), dtype=self.model.dtype, device=self.model.device) for _ in "kv"]
        for cache in pair:
            cache[0, 0] = 0
        return pair[0], pair[1]

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]], pad_reqs: int = 0, pad_tokens: int = 0) -> None:
        """Run one step. Rows that only continue by one token must come first."""
        rows = [self.rows[i] for i, _ in work]
        lens = np.array([len(tokens) for _, tokens in work], dtype=np.int32)
        tables = []
        if self.attention:
            tables.append(np.stack([row.blocks for row in rows]))
        if self.pool:
            tables.append(np.array([[row.slot] for row in rows], dtype=np.int32))
        computed = np.array([row.computed for row in rows], dtype=np.int32)
        prefilling = (lens > 1) | (computed == 0)
        ids = np.concatenate([np.asarray(tokens, dtype=np.int32) for _, tokens in work])
        num_tokens = int(lens.sum())
        shape = BatchShape(
            len(work), num_tokens, len(work) + pad_reqs, num_tokens + pad_tokens, max(int(lens.max()), 1)
        )
        self.buffers.poison()
        batch = self.buffers.stage(StepRows(lens, computed, prefilling, ids, tuple(tables)), shape)
        attention = self.builder.build(batch, 0) if self.attention else None
        mamba = self.mamba_builder.build(batch, len(tables) - 1) if self.mamba_builder else None
        context = StepContext(batch, self.backend, attention, mamba, self.kv, self.states, [None] * len(self.states))
        logits = self.model.logits(self.model.run(Execution(None, context))[0])[:num_tokens]
        for row, part in zip(rows, logits.split(lens.tolist()), strict=True):
            row.logits.append(part)
            row.computed += part.shape[0]

    def run(self, tokens: Sequence[int], chunks: Sequence[int], row: int = 0) -> Tensor:
        """One request in pieces of the given lengths, which sum to its length: logits (len, V)."""
        at = 0
        for length in chunks:
            self.step([(row, tokens[at : at + length])])
            at += length
        assert at == len(tokens)
        return self.take(row)

    def take(self, row: int = 0) -> Tensor:
        """The logits of a row so far; the row starts over."""
        logits = torch.cat(self.rows[row].logits)
        self.rows[row].logits, self.rows[row].computed = [], 0
        return logits
