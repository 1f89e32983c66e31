"""How much memory the caches take, and the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bateleur.mamba import CacheLayout, MambaCacheMode, Rings, StatePool
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.state_pages import StatePages, pages_per_request
from bateleur.runner.config.state_options import StateOptions
from bateleur.runner.models.spec import AttentionLayer, ModelSpec


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
    states: StateOptions = field(default_factory=StateOptions)
    num_state_rows: int = 0
    """Rows of rings, the null row included; 0 where the policy has none."""

    @property
    def total_bytes(self) -> int:
        """What both caches occupy."""
        return self.kv_bytes + self.state_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token occupies over all attention layers."""
    layers = (layer for layer in spec.layers if isinstance(layer, AttentionLayer))
    return sum(2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)


def plan_caches(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int,
    share_prefixes: bool = False,
    states: StateOptions | None = None,
    draft_kv_bytes_per_token: int = 0,
) -> CachePlan:
    """Fit the caches into `budget_bytes`: what every running request needs of states first, then as many KV blocks, and
    states for the prefixes in them, as could ever be used.

    A draft head's keys and values, `draft_kv_bytes_per_token`, lie in the blocks of the target's.

    Raises ValueError with both numbers when the states and two KV blocks do not fit, and for a cache mode that does not
    go with `share_prefixes`.
    """
    states = states or StateOptions()
    specs, layout = states.specs(spec, dtype), None
    slots = useful_slots = rows_bytes = 0
    if specs:
        layout = _layout(
            states, block_size if kv_bytes_per_token(spec, dtype) else 1, max_model_len, share_prefixes
        )
        slots = 1 + max_num_seqs * pages_per_request(layout)
        useful_slots = slots + max_num_seqs * layout.columns() if share_prefixes else slots
        rows_bytes = (1 + max_num_seqs) * sum(
            s.live_bytes + s.ring_bytes(layout.ring_capacity) for s in specs
        )
    slot_bytes = sum(s.page_bytes for s in specs)
    token_bytes = kv_bytes_per_token(spec, dtype) + draft_kv_bytes_per_token
    block_bytes = block_size * token_bytes
    max_blocks = -(-max_model_len // block_size) if block_bytes else 0
    needed = rows_bytes + slots * slot_bytes + 2 * block_bytes
    if needed > budget_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes is {budget_bytes}; the state of max_num_seqs = {max_num_seqs} requests and two "
            f"KV blocks take {needed} bytes"
        )
    spare = budget_bytes - rows_bytes - slots * slot_bytes
    if useful_slots > slots and layout is not None:
        # Both caches hold the same prefixes, so both grow by the same number of tokens.
        more = int(max(spare - 2 * block_bytes, 0) // (slot_bytes + layout.block_size * token_bytes))
        more = min(useful_slots - slots, more)
        slots += more
        spare -= more * slot_bytes
    num_blocks = min(spare // block_bytes, 1 + max_num_seqs * max_blocks) if block_bytes else 0
    num_rows = 1 + max_num_seqs if rows_bytes else 0
    sizes = (block_size, num_blocks, max_blocks, slots, layout)
    taken = (num_blocks * block_bytes, rows_bytes + slots * slot_bytes)
    return CachePlan(*sizes, *taken, share_prefixes, states, num_rows)


def _layout(
    states: StateOptions, kv_block_size: int, max_model_len: int, share_prefixes: bool
) -> CacheLayout:
    if share_prefixes == (states.mode is MambaCacheMode.NONE):
        raise ValueError(
            f"mamba_cache_mode is {states.mode.value!r} and enable_prefix_caching {share_prefixes}; prefixes are "
            "shared in the modes 'align' and 'all', and in these alone"
        )
    layout = states.layout(kv_block_size, max_model_len)
    states.kept(layout)  # a rule that is not known is refused here
    return layout


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
        self.pool: StatePool | None = None
        self.states: list[tuple[Tensor, Tensor]] = []
        self.rings: list[Rings | None] = []
        if plan.layout is not None:
            specs = plan.states.specs(spec, dtype)
            capacity = plan.layout.ring_capacity
            self.pool = StatePool(
                specs, plan.num_state_slots, device, num_rows=plan.num_state_rows, ring_capacity=capacity
            )
            self.states = [self.pool.layer(i) for i in range(len(specs))]
            self.rings = [self.pool.rings(i) for i in range(len(specs))]

    def block_pool(self) -> BlockPool | None:
        """A fresh free list over the KV blocks; None for a model without attention."""
        return BlockPool(self.plan.num_blocks) if self.kv else None

    def state_pages(self, num_rows: int) -> StatePages | None:
        """Fresh page tables of `num_rows` requests; None where each row has its own slots for ever."""
        layout = self.plan.layout
        if layout is None or layout.mode is MambaCacheMode.NONE:
            return None
        pool = BlockPool(self.plan.num_state_slots)
        return StatePages(pool, num_rows, layout, self.plan.states.kept(layout))
