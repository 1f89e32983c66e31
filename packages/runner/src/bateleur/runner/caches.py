"""How much memory the caches take, and the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaSpec, StatePool
from bateleur.runner.block_pool import BlockPool
from bateleur.runner.spec import AttentionLayer, MambaLayer, ModelSpec


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The sizes of both caches, decided once from a budget."""

    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    """KV blocks, the null block included; 0 for a model without attention."""
    max_blocks: int
    """KV blocks of the longest request."""
    num_state_slots: int
    """Mamba state slots, the null slot included; 0 for a model without Mamba layers."""
    layout: CacheLayout | None
    """Columns and slots of a request in the Mamba cache."""
    kv_bytes: int
    state_bytes: int
    share_prefixes: bool = False
    """Whether requests share what they computed of equal prefixes."""

    @property
    def total_bytes(self) -> int:
        """What both caches occupy."""
        return self.kv_bytes + self.state_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token occupies over all attention layers."""
    layers = (layer for layer in spec.layers if isinstance(layer, AttentionLayer))
    return sum(2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def state_specs(spec: ModelSpec, dtype: torch.dtype) -> list[MambaSpec]:
    """The state of each Mamba layer, with the conv window in the model's dtype."""
    return [layer.state_spec(dtype) for layer in spec.layers if isinstance(layer, MambaLayer)]


def plan_caches(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int,
    share_prefixes: bool = False,
) -> CachePlan:
    """Fit the caches into `budget_bytes`: all state slots first, then as many KV blocks as could ever be used.

    Raises ValueError with both numbers when the state slots and one KV block do not fit.
    """
    states = state_specs(spec, dtype)
    if states and share_prefixes:
        raise ValueError("enable_prefix_caching is True; models with Mamba layers can't share prefixes yet")
    layout = None
    num_slots = 0
    if states:
        layout = CacheLayout(MambaCacheMode.NONE, max_model_len, 0, max_model_len)
        num_slots = 1 + max_num_seqs * layout.slots_per_request()
    state_bytes = num_slots * sum(s.page_bytes for s in states)
    block_bytes = block_size * kv_bytes_per_token(spec, dtype)
    max_blocks = -(-max_model_len // block_size) if block_bytes else 0
    needed = state_bytes + 2 * block_bytes
    if needed > budget_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes is {budget_bytes}; the state of max_num_seqs = {max_num_seqs} requests and two "
            f"KV blocks take {needed} bytes"
        )
    num_blocks = 0
    if block_bytes:
        num_blocks = min((budget_bytes - state_bytes) // block_bytes, 1 + max_num_seqs * max_blocks)
    return CachePlan(
        block_size,
        num_blocks,
        max_blocks,
        num_slots,
        layout,
        num_blocks * block_bytes,
        state_bytes,
        share_prefixes,
    )


class Caches:
    """The tensors: a pair of paged tensors for each attention layer, a state pool for all Mamba layers."""

    def __init__(self, spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.kv: list[tuple[Tensor, Tensor]] = []
        for layer in spec.layers:
            if isinstance(layer, AttentionLayer):
                shape = (plan.num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim)
                pair = (
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(shape, dtype=dtype, device=device),
                )
                self.kv.append(pair)
        states = state_specs(spec, dtype)
        self.pool = StatePool(states, plan.num_state_slots, device) if states else None
        self.states = [self.pool.layer(i) for i in range(len(states))] if self.pool else []

    def block_pool(self) -> BlockPool | None:
        """A fresh free list over the KV blocks; None for a model without attention."""
        return BlockPool(self.plan.num_blocks) if self.kv else None
