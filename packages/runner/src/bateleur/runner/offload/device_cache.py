"""The device's cache as what lies beside it sees it: prefixes by name, and the bytes under each number."""

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
class Paged:
    """KV blocks, or state pages: which are free or known by a key, and the bytes of each."""

    pool: BlockPool
    rows: PagedRows

    def add(self, keys: Sequence[Hashable], data: NDArray[np.uint8]) -> bool:
        """Let requests find `keys` with these contents (n, num_bytes), where nothing has them yet.

        Nobody writes to `data` from now on. False if there is not enough room; then nothing is done.
        """
        filled = self.pool.fill(keys)
        if filled:
            self.rows.put([number for _, number in filled], data[[index for index, _ in filled]])
        return filled is not None


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """What requests share, and where it lies."""

    prefixes: PrefixCache
    blocks: Paged | None
    """Keys and values of all layers, a draft head's included; None for a model without attention."""
    pages: Paged | None
    """States of all layers; None for a model without recurrent ones."""

    @classmethod
    def of(
        cls, prefixes: PrefixCache, caches: Caches, draft_kv: Sequence[tuple[Tensor, Tensor]]
    ) -> DeviceCache:
        """draft_kv: keys and values of a draft head, in the same blocks."""
        blocks = pages = None
        if caches.blocks is not None:
            kv = {f"kv.{i}": pair for i, pair in enumerate(caches.kv)}
            kv |= {f"draft.{i}": pair for i, pair in enumerate(draft_kv)}
            found = {
                f"{name}.{kind}": tensor
                for name, pair in kv.items()
                for kind, tensor in zip(("keys", "values"), pair, strict=True)
            }
            blocks = Paged(caches.blocks, PagedRows(found))
        if caches.free_pages is not None:
            states = {
                f"states.{i}.{kind}": tensor
                for i, pair in enumerate(caches.states)
                for kind, tensor in zip(("conv", "state"), pair, strict=True)
                if tensor is not None and tensor.numel()
            }
            pages = Paged(caches.free_pages, PagedRows(states))
        return cls(prefixes, blocks, pages)
