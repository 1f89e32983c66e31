"""Blocks are zeroed between being handed out and being used, for attention backends that need finite caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool


class FreshBlocks:
    """Zeroes what a pool handed out since it last looked, in all caches that share its blocks.

    A request that went wrong leaves NaN in its blocks. A kernel that gives what a row must not see the weight 0 makes
    NaN of it for the next holder, whose entries behind its last token are still those.
    """

    def __init__(self, pool: BlockPool, caches: Sequence[Tensor]) -> None:
        """`caches`: tensors (num_blocks, ...) of one device, the draft's among them."""
        pool.fresh = []
        self._pool = pool
        self._caches = tuple(caches)

    def zero(self) -> None:
        """To be called between the allocation of a step's blocks and the step."""
        blocks, self._pool.fresh = self._pool.fresh, []
        if not blocks:
            return
        index = torch.tensor(blocks).to(self._caches[0].device, non_blocking=True)
        for cache in self._caches:
            cache.index_fill_(0, index, 0)
