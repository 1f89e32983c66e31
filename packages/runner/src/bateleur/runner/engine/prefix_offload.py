"""Host-memory and disk tiers of the prefix cache, and prefix export and import."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.engine.prefix_layout import PrefixLayout
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.offload.disk_folder import DiskFolder, make_folder
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.prefix_transfer import PrefixTransfer
from bateleur.runner.offload.rows import DeviceCache
from bateleur.runner.offload.tier import HostTier
from bateleur.runner.stats import EngineStats, OffloadStats
from bateleur.runner.utils.device import explain_out_of_memory

_WAIT_SECONDS = 0.02
"""To wait for files if there is nothing else to do."""


class PrefixOffload:
    """Host-memory and disk tiers of the prefix cache of one engine, and prefix export and import.

    The prefix cache looks blocks up here by itself (`PrefixCache.offload_tiers`).
    """

    def __init__(
        self,
        setup: EngineSetup,
        stats: EngineStats,
        prefixes: PrefixCache | None,
        caches: Caches,
        draft_kv: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """prefixes: None without prefix caching. draft_kv: keys and values of a draft head.

        Raises ValueError for a folder that can't be written to, or memory that can't be allocated.
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
            prefixes.offload_tiers = offload_tiers = HostTier.of(shared, sizes, setup.model.device, stats.offload)
        if setup.disk is not None:
            path, limit = setup.disk
            folder = DiskFolder(path, layout.get(make_folder(path)), limit, ranks.local[1])
            offload_tiers.disk = self.disk = DiskTier(
                folder, shared, offload_tiers.blocks, offload_tiers.pages, stats.offload, ranks
            )

    @property
    def handover(self) -> PrefixTransfer:
        """Prefix export and import. Raises ValueError without prefix caching."""
        if self._handover is None:
            raise ValueError("enable_prefix_caching is False; there are no prefixes to export or import")
        return self._handover

    def wait(self) -> None:
        """Wait up to 20 ms for files that requests need."""
        if self.disk is not None:
            self.disk.wait(_WAIT_SECONDS)
