"""What lies outside of the device's caches: host memory, a disk, and files that go to other engines."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.engine.prefix_layout import PrefixLayout
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.offload.device_cache import DeviceCache
from bateleur.runner.offload.disk_folder import DiskFolder, make_folder
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.prefix_transfer import PrefixTransfer
from bateleur.runner.offload.tier import HostTier
from bateleur.runner.stats import EngineStats, OffloadStats
from bateleur.runner.utils.device import explain_out_of_memory

_WAIT_SECONDS = 0.02
"""For files, where there is nothing else to do."""


class PrefixOffload:
    """Of one engine. To be told of the end of each step; `prefixes` asks it by itself (`PrefixCache.below`)."""

    def __init__(
        self,
        setup: EngineSetup,
        stats: EngineStats,
        prefixes: PrefixCache | None,
        caches: Caches,
        draft_kv: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """prefixes: None where none are shared. draft_kv: keys and values of a draft head.

        Raises ValueError for a folder that can't be written to, or memory that can't be had.
        """
        self.disk: DiskTier | None = None
        self._handover: PrefixTransfer | None = None
        ranks = setup.model.ranks
        if prefixes is None:
            return
        shared = DeviceCache.of(prefixes, caches, draft_kv)
        layout = PrefixLayout(setup, shared)
        self._handover = PrefixTransfer(shared, layout.get, ranks)
        if (sizes := setup.host) is None:
            return
        stats.offload = OffloadStats(sizes.num_bytes)
        with explain_out_of_memory(kv_offload_bytes=sizes.num_bytes):
            prefixes.below = below = HostTier.of(shared, sizes, setup.model.device, stats.offload)
        if setup.disk is not None:
            path, limit = setup.disk
            folder = DiskFolder(path, layout.get(make_folder(path)), limit, ranks.local[1])
            below.disk = self.disk = DiskTier(folder, shared, below.blocks, below.pages, stats.offload, ranks)

    @property
    def handover(self) -> PrefixTransfer:
        """Prefixes to and from files. Raises ValueError where none are shared."""
        if self._handover is None:
            raise ValueError("enable_prefix_caching is False; there are no prefixes to hand over")
        return self._handover

    def advance(self, *, idle: bool) -> None:
        """A step has ended. idle: nobody waits for another."""
        if self.disk is not None:
            self.disk.advance(idle=idle)

    def wait(self) -> None:
        """For files that requests wait for, a moment."""
        if self.disk is not None:
            self.disk.wait(_WAIT_SECONDS)

    def drain(self) -> None:
        """What waits to be written is written."""
        if self.disk is not None:
            self.disk.drain()
