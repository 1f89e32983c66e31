"""The tensors of both caches, as a plan says, the free lists over them, and blocks zeroed where backends ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba import MambaStateManager, Rings, StatePool
from bateleur.metadata import upload
from bateleur.metadata.native.lazy_zeros import lazy_zeros
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.models.spec import ModelSpec


class Caches:
    """A pair of paged tensors for each attention layer, a state pool for all recurrent layers."""

    def __init__(self, spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        heads = [(each.num_kv_heads, each.head_dim) for each in spec.attention]
        self.kv = kv_caches(plan, heads, dtype, device)
        self.blocks = BlockPool(plan.num_blocks) if self.kv else None
        """The free list over KV blocks; None for a model without attention."""
        self.pages: MambaStateManager | None = None
        """The page tables of all rows; None where each row has its own slots for ever."""
        self.free_pages: BlockPool | None = None
        """The free list over state pages; None where they are not shared."""
        self.pool: StatePool | None = None
        self.states: list[tuple[Tensor, Tensor | None]] = []
        self.rings: list[Rings | None] = []
        if plan.layout is not None:
            specs = plan.costs.options.states.specs(spec, dtype)
            self.pool = StatePool(
                specs,
                plan.num_state_slots,
                device,
                num_rows=1 + plan.max_num_seqs,
                ring_capacity=plan.layout.ring_capacity,
            )
            self.states = [self.pool.layer(i) for i in range(len(specs))]
            self.rings = [self.pool.rings(i) for i in range(len(specs))]
            if plan.costs.retention is not None:
                self.free_pages = free = BlockPool(plan.num_state_slots)
                self.pages = MambaStateManager(free, plan.max_num_seqs, plan.layout, plan.costs.retention)

    def named(self) -> dict[str, Tensor]:
        """Every tensor: `kv.0.1` has the values of attention layer 0, `rings.2.request_conv` windows of layer 2."""
        found: dict[str, Tensor | None] = {}
        for kind, layers in (("kv", self.kv), ("states", self.states)):
            found |= {f"{kind}.{i}.{j}": each for i, pair in enumerate(layers) for j, each in enumerate(pair)}
        for i, rings in enumerate(self.rings):
            if rings is not None and self.pool is not None:
                names = [each.name for each in self.pool.specs[i].ring_entry]
                found |= {f"rings.{i}.{n}": each for n, each in zip(names, rings.entries, strict=True)}
                found[f"rings.{i}.request_conv"] = rings.request_conv
        return {name: each for name, each in found.items() if each is not None}


def kv_caches(
    plan: CachePlan, heads: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of layers of so many heads and lanes: zeros (num_blocks, block_size, num_kv_heads, head_dim)."""
    shapes = [(plan.num_blocks, plan.block_size, *each) for each in heads]
    empty = partial(lazy_zeros, dtype=dtype, device=device)
    return [(empty(shape), empty(shape)) for shape in shapes]


def zero_fresh_blocks(pool: BlockPool, caches: Sequence[Tensor]) -> None:
    """Zero what a pool handed out since it was last looked at, in all caches (num_blocks, ...) that share its blocks.

    For attention backends that need finite caches, before a step. A request that went wrong leaves NaN in its blocks,
    and a kernel that gives what a row must not see the weight 0 makes NaN of it for the next holder.
    """
    blocks, pool.fresh = pool.fresh, []
    if blocks:
        index = upload(np.array(blocks), caches[0].device)
        for cache in caches:
            cache.index_fill_(0, index, 0)
