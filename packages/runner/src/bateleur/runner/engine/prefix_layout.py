"""The identity of exported prefixes: everything that cache contents depend on besides the tokens."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from bateleur.mamba import StatePolicy
from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.offload.rows import DeviceCache, RowLayout
from bateleur.runner.offload.weights_digest import WeightFiles
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.utils.version import package_version


class PrefixLayout:
    """The layout of an engine's exported prefixes, computed on first use because that reads all weights."""

    def __init__(self, setup: EngineSetup, cache: DeviceCache) -> None:
        """Record the weight files; must be called right after the weights are loaded."""
        self._setup, self._cache, self._model = setup, cache, WeightFiles.of(setup.folder)
        head = setup.drafter
        self._draft = WeightFiles.of(head.report.path) if isinstance(head, DraftHead) else None
        self._layout: RowLayout | None = None

    def get(self, digest_folder: Path | None = None) -> RowLayout:
        """Return the layout. digest_folder: folder that caches digests of weights."""
        if self._layout is None:
            prefixes, blocks, pages = self._cache.prefixes, self._cache.blocks, self._cache.pages
            weights = {
                "weights": self._digest(self._model, digest_folder),
                "draft": "none" if self._draft is None else self._digest(self._draft, digest_folder),
            }
            self._layout = RowLayout(
                weights | _fields(self._setup),
                prefixes.block_size,
                prefixes.granularity,
                prefixes.num_lookahead_tokens,
                () if blocks is None else blocks.rows.parts,
                () if pages is None else pages.rows.parts,
            )
        return self._layout

    def _digest(self, files: WeightFiles, digest_folder: Path | None) -> str:
        """Return the digest of weight files. Only the first rank of each machine reads the files."""
        ranks = self._setup.model.ranks
        first = not ranks.local[0]
        digest = run_on_all_ranks(ranks, lambda: files.digest(_memory(digest_folder, files)) if first else "0" * 32)
        words = ranks.gather_ints([int(digest[i : i + 8], 16) for i in range(0, 32, 8)])
        return "".join(f"{word:08x}" for word in words[ranks.rank - ranks.local[0]])


def _memory(digest_folder: Path | None, files: WeightFiles) -> Path | None:
    """Return the file that caches the digest of a folder of weights; None without a folder `digest_folder`."""
    if digest_folder is None:
        return None
    name = blake2b(str(files.folder.absolute()).encode(), digest_size=8).hexdigest()
    return digest_folder / f"weights-{name}.json"


def _fields(setup: EngineSetup) -> dict[str, str]:
    model, plan, layout = setup.model, setup.cache_plan, setup.cache_plan.layout
    device = "cpu" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    policy = "none" if layout is None else layout.policy.value
    slots = layout is not None and layout.policy is StatePolicy.SLOTS
    return {
        "model": blake2b(repr(setup.spec).encode(), digest_size=8).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(plan.costs.kv_dtype).removeprefix("torch."),
        "device": device,
        "attention_backend": setup.backend.name,
        "prompt_scan": setup.prompt_scan.value,
        "block_size": str(plan.block_size),
        "mamba_block_size": "none" if layout is None else str(layout.block_size),
        "state_policy": policy,
        "drafts": str(setup.limits.num_speculative_tokens if slots else 0),
        "rank": f"{model.ranks.rank} of {model.ranks.size}",
        "bateleur": package_version(),
        "torch": str(torch.__version__),
    }
