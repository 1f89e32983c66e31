"""Host-memory and disk tiers of the prefix cache, and prefix export and import."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from bateleur.mamba import StatePolicy
from bateleur.runner.cache.prefix_cache import PrefixCache
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.offload.disk_folder import DiskFolder, make_folder
from bateleur.runner.offload.disk_tier import DiskTier
from bateleur.runner.offload.prefix_transfer import PrefixTransfer
from bateleur.runner.offload.rows import DeviceCache, RowLayout
from bateleur.runner.offload.tier import HostTier
from bateleur.runner.offload.weights_digest import WeightFiles
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.stats import EngineStats, OffloadStats
from bateleur.runner.utils.device import explain_out_of_memory
from bateleur.runner.utils.version import package_version


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
        # Right after the weights are loaded, so that the files are the same ones.
        self._setup, self._shared, self._files = setup, shared, {"weights": WeightFiles.of(setup.folder)}
        if isinstance(setup.drafter, DraftHead):
            self._files["draft"] = WeightFiles.of(setup.drafter.report.path)
        self._layout: RowLayout | None = None
        self._handover = PrefixTransfer(shared, self._exported_layout, ranks)
        if (sizes := setup.host) is None:
            return
        stats.offload = OffloadStats(sizes.num_bytes)
        with explain_out_of_memory(kv_offload_bytes=sizes.num_bytes):
            prefixes.offload_tiers = offload_tiers = HostTier.of(shared, sizes, setup.model.device, stats.offload)
        if setup.disk is not None:
            path, limit = setup.disk
            folder = DiskFolder(path, self._exported_layout(make_folder(path)), limit, ranks.local[1])
            blocks, pages = offload_tiers.blocks, offload_tiers.pages
            offload_tiers.disk = self.disk = DiskTier(folder, shared, blocks, pages, ranks)

    @property
    def handover(self) -> PrefixTransfer:
        """The object that exports and imports prefixes. Raises ValueError without prefix caching."""
        if self._handover is None:
            raise ValueError("enable_prefix_caching is False; there are no prefixes to export or import")
        return self._handover

    def _exported_layout(self, digest_folder: Path | None = None) -> RowLayout:
        """Return the layout of exported prefixes. It is computed on first use, because that reads all weights.
        digest_folder: folder that caches digests of weights.
        """
        if self._layout is None:
            prefixes, blocks, pages = self._shared.prefixes, self._shared.blocks, self._shared.pages
            weights = {name: self._digest(files, digest_folder) for name, files in self._files.items()}
            self._layout = RowLayout(
                {"draft": "none"} | weights | _fields(self._setup),
                prefixes.block_size,
                prefixes.granularity,
                prefixes.num_lookahead_tokens,
                () if blocks is None else blocks.rows.parts,
                () if pages is None else pages.rows.parts,
            )
        return self._layout

    def _digest(self, files: WeightFiles, digest_folder: Path | None) -> str:
        """Return the digest of weight files. Only the first rank of each machine reads the files."""
        ranks, cached = self._setup.model.ranks, None
        if digest_folder is not None:
            name = blake2b(str(files.folder.absolute()).encode(), digest_size=8).hexdigest()
            cached = digest_folder / f"weights-{name}.json"
        digest = run_on_all_ranks(ranks, lambda: "0" * 32 if ranks.local[0] else files.digest(cached))
        words = ranks.gather_ints([int(digest[i : i + 8], 16) for i in range(0, 32, 8)])
        return "".join(f"{word:08x}" for word in words[ranks.rank - ranks.local[0]])


def _fields(setup: EngineSetup) -> dict[str, str]:
    model, plan, layout = setup.model, setup.cache_plan, setup.cache_plan.layout
    slots = layout is not None and layout.policy is StatePolicy.SLOTS
    return {
        **setup.load_options,
        "model": blake2b(repr(setup.spec).encode(), digest_size=8).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(plan.costs.kv_dtype).removeprefix("torch."),
        "device": "cpu" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device),
        "attention_backend": setup.backend.name,
        "prompt_scan": setup.prompt_scan.value,
        "block_size": str(plan.block_size),
        "mamba_block_size": "none" if layout is None else str(layout.block_size),
        "state_policy": "none" if layout is None else layout.policy.value,
        "drafts": str(setup.limits.num_speculative_tokens if slots else 0),
        "rank": f"{model.ranks.rank} of {model.ranks.size}",
        "bateleur": package_version(),
        "torch": str(torch.__version__),
    }
