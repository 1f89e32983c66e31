"""The cache tensors of a plan, their block pools, and zeroing of new blocks."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba import MambaStateManager, Rings, StatePool
from bateleur.metadata import movable, upload
from bateleur.metadata.native.lazy_zeros import lazy_zeros
from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.models.spec import ModelSpec


class Caches:
    """Cache tensors: keys and values of each attention layer, and a state pool of all recurrent layers."""

    def __init__(self, spec: ModelSpec, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        heads = [(each.num_kv_heads, each.head_dim) for each in spec.attention]
        self.kv = kv_caches(plan, heads, device)
        self.blocks = BlockPool(plan.num_blocks) if self.kv else None
        """Pool of KV blocks; None for a model without attention."""
        self.pages: MambaStateManager | None = None
        """State blocks of all rows; None if each row has fixed slots."""
        self.free_pages: BlockPool | None = None
        """Pool of state pages; None without prefix caching."""
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
        """Return tensors by name. `kv.0.1`: values of attention layer 0. `rings.2.request_conv`: recurrent layer 2."""
        found: dict[str, Tensor | None] = {}
        for kind, layers in (("kv", self.kv), ("states", self.states)):
            found |= {f"{kind}.{i}.{j}": each for i, pair in enumerate(layers) for j, each in enumerate(pair)}
        for i, rings in enumerate(self.rings):
            if rings is not None and self.pool is not None:
                names = [each.name for each in self.pool.specs[i].ring_entry]
                found |= {f"rings.{i}.{n}": each for n, each in zip(names, rings.entries, strict=True)}
                found[f"rings.{i}.request_conv"] = rings.request_conv
        return {name: each for name, each in found.items() if each is not None}


def kv_caches(plan: CachePlan, heads: Iterable[tuple[int, int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return zeroed keys and values (num_blocks, block_size, num_kv_heads, head_dim) in the plan's dtype.
    heads: (num_kv_heads, head_dim) of each layer.
    """
    shapes = [(plan.num_blocks, plan.block_size, *each) for each in heads]
    empty = partial(lazy_zeros, dtype=plan.costs.kv_dtype, device=device)
    return [(empty(shape), empty(shape)) for shape in shapes]


def zero_fresh_blocks(pool: BlockPool, caches: Sequence[Tensor]) -> None:
    """Zero the blocks allocated since the last call, in all caches (num_blocks, ...) of the pool.
    It is called before a step for attention backends that need finite caches. A failed request leaves NaN in its
    blocks. A kernel that gives masked keys weight 0 would turn them into NaN for the next request.
    """
    blocks, pool.fresh = pool.fresh, []
    if blocks:
        index = upload(np.array(blocks), caches[0].device)
        for cache in caches:
            movable(cache).index_fill_(0, index, 0)
