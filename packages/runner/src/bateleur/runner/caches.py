"""How much memory the caches take, and the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaSpec, Retention, StatePool
from bateleur.runner.block_pool import BlockPool
from bateleur.runner.spec import AttentionLayer, MambaLayer, ModelSpec
from bateleur.runner.state_pages import StatePages

DEFAULT_KV_BLOCK = 16
"""Tokens of a KV block, unless the user says otherwise."""

DEFAULT_STATE_BLOCK = 256
"""Tokens between two Mamba states that are kept for others, unless the user says otherwise."""


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


def state_layout(
    mode: MambaCacheMode, block_size: int | None, kv_block_size: int, max_model_len: int
) -> CacheLayout:
    """Where a request's Mamba states lie in `mode`; block_size None is DEFAULT_STATE_BLOCK, or what a request needs.

    Raises ValueError for a block size that no KV block ends with.
    """
    if mode is MambaCacheMode.NONE:
        return CacheLayout(mode, max_model_len, 0, max_model_len)
    if block_size is None:
        longest = min(DEFAULT_STATE_BLOCK, max_model_len)
        block_size = max(longest // kv_block_size, 1) * kv_block_size
    if block_size % kv_block_size:
        raise ValueError(
            f"mamba_block_size is {block_size}; it must be a multiple of block_size = {kv_block_size}, so that KV "
            "blocks and states end at the same tokens"
        )
    return CacheLayout(mode, block_size, 0, max_model_len)


def plan_caches(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int,
    share_prefixes: bool = False,
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.NONE,
    mamba_block_size: int | None = None,
) -> CachePlan:
    """Fit the caches into `budget_bytes`: what every running request needs of states first, then as many KV blocks, and
    states for the prefixes in them, as could ever be used.

    Raises ValueError with both numbers when the states and two KV blocks do not fit, and for a cache mode that does not
    go with `share_prefixes`.
    """
    states = state_specs(spec, dtype)
    layout, slots, useful_slots = None, 0, 0
    if states:
        if share_prefixes == (mamba_cache_mode is MambaCacheMode.NONE):
            raise ValueError(
                f"mamba_cache_mode is {mamba_cache_mode.value!r} and enable_prefix_caching {share_prefixes}; prefixes "
                "are shared in the modes 'align' and 'all', and in these alone"
            )
        kv_block = block_size if kv_bytes_per_token(spec, dtype) else 1
        layout = state_layout(mamba_cache_mode, mamba_block_size, kv_block, max_model_len)
        each = 2 if share_prefixes else layout.slots_per_request()
        slots = 1 + max_num_seqs * each
        useful_slots = slots + max_num_seqs * layout.columns() if share_prefixes else slots
    slot_bytes = sum(s.page_bytes for s in states)
    block_bytes = block_size * kv_bytes_per_token(spec, dtype)
    max_blocks = -(-max_model_len // block_size) if block_bytes else 0
    needed = slots * slot_bytes + 2 * block_bytes
    if needed > budget_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes is {budget_bytes}; the state of max_num_seqs = {max_num_seqs} requests and two "
            f"KV blocks take {needed} bytes"
        )
    spare = budget_bytes - slots * slot_bytes
    if useful_slots > slots and layout is not None:
        # Both caches hold the same prefixes, so both grow by the same number of tokens.
        tokens_bytes = slot_bytes + layout.block_size * kv_bytes_per_token(spec, dtype)
        slots = min(useful_slots, slots + int(max(spare - 2 * block_bytes, 0) // tokens_bytes))
        spare = budget_bytes - slots * slot_bytes
    num_blocks = min(spare // block_bytes, 1 + max_num_seqs * max_blocks) if block_bytes else 0
    return CachePlan(
        block_size,
        num_blocks,
        max_blocks,
        slots,
        layout,
        num_blocks * block_bytes,
        slots * slot_bytes,
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

    def state_pages(self, num_rows: int, max_model_len: int) -> StatePages | None:
        """Fresh page tables of `num_rows` requests; None where each row has its own slots for ever."""
        layout = self.plan.layout
        if layout is None or layout.mode is MambaCacheMode.NONE:
            return None
        pool = BlockPool(self.plan.num_state_slots)
        return StatePages(pool, num_rows, layout.columns(), Retention.of(layout))
