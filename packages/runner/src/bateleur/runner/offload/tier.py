"""What leaves the device's caches stays in host memory, and comes back when a request asks for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.device_cache import DeviceCache, Paged
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.host_memory import HostMemory, HostSizes
from bateleur.runner.offload.level import Level
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.stats import OffloadStats


class HostTier:
    """Blocks and pages of prefixes in host memory: what is `below` a prefix cache."""

    def __init__(self, blocks: Level | None, pages: Level | None, stats: OffloadStats) -> None:
        """None where the model has no attention, or no recurrent layers."""
        self.blocks, self.pages, self.stats = blocks, pages, stats
        self.disk: DiskTier | None = None
        """What lies further below."""
        for level in (blocks, pages):
            if level is not None:
                level.device.pool.leaving = level.leave

    @classmethod
    def of(cls, cache: DeviceCache, sizes: HostSizes, device: torch.device, stats: OffloadStats) -> HostTier:
        """Memory for as many rows as `sizes` says."""
        rows = [each.rows.num_bytes for each in (cache.blocks, cache.pages) if each is not None]
        copies = Copies(device, max(rows))

        def level(paged: Paged | None, count: int) -> Level | None:
            if paged is None:
                return None
            return Level(paged, HostMemory(count, paged.rows.num_bytes, device), copies, stats)

        return cls(level(cache.blocks, sizes.num_blocks), level(cache.pages, sizes.num_pages), stats)

    def has_block(self, name: bytes) -> bool:
        """Whether a block of this name is here."""
        return self.blocks is not None and name in self.blocks.host

    def has_page(self, key: bytes) -> bool:
        """Whether the state behind a prefix is here."""
        return self.pages is not None and key in self.pages.host

    def bring(self, blocks: list[bytes], page: bytes | None, num_tokens: int) -> None:
        """Let requests find all of these on the device, each of which is there or here, as far as it has room.

        num_tokens: how many more of a request's are found with them.
        """
        there = self.blocks is None or self.blocks.bring(blocks)
        if there and self.pages is not None and page is not None:
            there = self.pages.bring([page])
        if there:
            self.stats.host_hit_tokens += num_tokens

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """What these are called is not to be shared."""
        for level, keys in ((self.blocks, blocks), (self.pages, pages)):
            if level is not None:
                for key in keys:
                    level.host.forget(key)
        if self.disk is not None:
            self.disk.forget(blocks, pages)

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], most: int) -> bool:
        """Whether files are read for a request."""
        return self.disk is not None and self.disk.fetch(request, keys, ids, most)

    def arrived(self) -> list[Request]:
        """Requests that need not wait any longer, whatever came of it."""
        return [] if self.disk is None else self.disk.arrived()

    def leave(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """What a request leaves is written where there is a disk."""
        if self.disk is not None:
            self.disk.leave(keys, ids, num_tokens, prompt_len)
