"""The device's prefix cache for offload: prefixes by key, and blocks and states as rows of bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.offload.rows import PagedRows


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The KV blocks or recurrent states of a device: their pool (numbers and keys) and their bytes."""

    pool: BlockPool
    rows: PagedRows

    def add(self, keys: Sequence[Hashable], data: NDArray[np.uint8]) -> bool:
        """Add the missing ones of `keys` with contents (n, num_bytes). The caller must not write to `data` any more.

        Returns False, and adds nothing, if there is not enough room.
        """
        filled = self.pool.fill(keys)
        if filled:
            self.rows.put([number for _, number in filled], data[[index for index, _ in filled]])
        return filled is not None


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """The prefix cache of a device and the memory of its blocks and states."""

    prefixes: PrefixCache
    blocks: PagedCache | None
    """Keys and values of all layers and the draft head; None for a model without attention."""
    pages: PagedCache | None
    """States of all layers; None for a model without recurrent layers."""

    @classmethod
    def of(cls, prefixes: PrefixCache, caches: Caches, draft_kv: Sequence[tuple[Tensor, Tensor]]) -> DeviceCache:
        """Describe the caches of a device. draft_kv: keys and values of a draft head, in the same blocks."""
        blocks = pages = None
        if caches.blocks is not None:
            kv = {f"kv.{i}": pair for i, pair in enumerate(caches.kv)}
            kv |= {f"draft.{i}": pair for i, pair in enumerate(draft_kv)}
            found = {
                f"{name}.{kind}": tensor
                for name, pair in kv.items()
                for kind, tensor in zip(("keys", "values"), pair, strict=True)
            }
            blocks = PagedCache(caches.blocks, PagedRows(found))
        if caches.free_pages is not None:
            states = {
                f"states.{i}.{kind}": tensor
                for i, pair in enumerate(caches.states)
                for kind, tensor in zip(("conv", "state"), pair, strict=True)
                if tensor is not None and tensor.numel()
            }
            pages = PagedCache(caches.free_pages, PagedRows(states))
        return cls(prefixes, blocks, pages)
