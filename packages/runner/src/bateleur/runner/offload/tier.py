"""The host-memory tier of the prefix cache."""

from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.host_memory import HostSizes, OffloadedRows
from bateleur.runner.offload.rows import DeviceCache
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.stats import OffloadStats


class HostTier:
    """Host memory for KV blocks and states that were evicted from the device, and the disk tier below it."""

    def __init__(self, blocks: OffloadedRows | None, pages: OffloadedRows | None, stats: OffloadStats) -> None:
        """blocks, pages: KV blocks and recurrent states; None if the model has no attention, or no recurrent layers."""
        self.blocks, self.pages, self.stats = blocks, pages, stats
        self.disk: DiskTier | None = None  # the disk tier, if there is one
        for level in (blocks, pages):
            if level is not None:
                level.device.pool.on_evict = level.save_evicted

    @classmethod
    def of(cls, cache: DeviceCache, sizes: HostSizes, device: torch.device, stats: OffloadStats) -> Self:
        """Return a tier with new host memory of these sizes. stats: counters that it updates."""
        rows = [each.rows.num_bytes for each in (cache.blocks, cache.pages) if each is not None]
        copies = Copies(device, max(rows))

        blocks, pages = (
            None if paged is None else OffloadedRows(paged, count, copies, stats)
            for paged, count in ((cache.blocks, sizes.num_blocks), (cache.pages, sizes.num_pages))
        )
        return cls(blocks, pages, stats)

    def has_block(self, name: bytes) -> bool:
        """Return whether host memory has the KV block with this key."""
        return self.blocks is not None and name in self.blocks

    def has_page(self, key: bytes) -> bool:
        """Return whether host memory has the recurrent state with this key."""
        return self.pages is not None and key in self.pages

    def load(self, blocks: list[bytes], page: bytes | None, num_tokens: int) -> None:
        """Copy KV blocks and a state, given by keys, from host memory to the device; stop if the device is full.

        num_tokens: tokens of the prefix cache hit, which are counted if everything was copied.
        """
        loaded = self.blocks is None or self.blocks.load(blocks)
        if loaded and self.pages is not None and page is not None:
            loaded = self.pages.load([page])
        if loaded:
            self.stats.host_hit_tokens += num_tokens

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Remove KV blocks and states with these keys from host memory and disk."""
        for level, keys in ((self.blocks, blocks), (self.pages, pages)):
            if level is not None:
                for key in keys:
                    level.forget(key)
        if self.disk is not None:
            self.disk.forget(blocks, pages)

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> bool:
        """Start to read the caches of up to `max_tokens` tokens of a request from disk, if there is a disk tier.

        keys: prefix-cache keys of token ids `ids`. Returns whether files are read; then `arrived` returns `request`.
        """
        return self.disk is not None and self.disk.fetch(request, keys, ids, max_tokens)

    def arrived(self) -> list[Request]:
        """Return the requests whose files were read, or could not be read, since the last call."""
        return [] if self.disk is None else self.disk.arrived()

    def save(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """Write the caches of the first `num_tokens` tokens of an ended request to disk, if there is a disk tier.

        ids: token ids, which must not be written to any more. keys: their prefix-cache keys. prompt_len: prompt tokens.
        """
        if self.disk is not None:
            self.disk.save(keys, ids, num_tokens, prompt_len)
