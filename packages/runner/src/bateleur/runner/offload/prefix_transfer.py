"""Export and import of prefixes: one file, or with several ranks a folder with a file for each rank."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.prefix_file import Prefix, encode_prefix, read_prefix
from bateleur.runner.offload.rows import DeviceCache, RowLayout
from bateleur.runner.offload.whole_file import write_whole
from bateleur.runner.requests.prefix_keys import PrefixKeys

_PART = "{rank}-of-{size}.safetensors"
_PARTS = re.compile(r"\d+-of-(\d+)\.safetensors")


class PrefixTransfer:
    """Exports and imports prefixes of one engine, between two steps, on all ranks at once."""

    def __init__(self, cache: DeviceCache, layout: Callable[[], RowLayout], ranks: Ranks) -> None:
        """layout: returns the layout of files; called when first needed, because it is slow. May raise ValueError."""
        self._cache, self._layout, self._ranks = cache, layout, ranks

    def export(self, ids: NDArray[np.int32], path: Path) -> int:
        """Write the longest cached prefix of `ids` to a file (several ranks: a folder); return its number of tokens.

        Waits for the device. Raises ValueError, with the reason, if nothing is cached, and OSError if writing fails; on
        all ranks if one of them fails.
        """
        layout = self._layout()
        return run_on_all_ranks(self._ranks, lambda: self._export(ids, path, layout))

    def import_file(self, path: Path) -> int:
        """Add the prefix in a file to the prefix cache and return its number of tokens.

        Blocks that are already cached are kept. Added ones can be evicted like any others. Raises PrefixRefused if the
        file is not an export of an engine like this one, and ValueError if the caches lack room; on all ranks if one of
        them fails.
        """
        layout = self._layout()
        prefix = run_on_all_ranks(self._ranks, lambda: self._read(path, layout))
        by_rank = self._ranks.gather_ints([int.from_bytes(prefix.key[:7], "big"), len(prefix.token_ids)])
        if any(each != by_rank[0] for each in by_rank):
            raise PrefixRefused("misnamed", f"{path}: its parts are of different prefixes")
        return run_on_all_ranks(self._ranks, lambda: self._add(prefix, path, layout))

    @torch.inference_mode()
    def _export(self, ids: NDArray[np.int32], path: Path, layout: RowLayout) -> int:
        cache = self._cache
        prefixes, keys = cache.prefixes, PrefixKeys(cache.prefixes.block_size)
        hit = prefixes.find(keys, ids, len(ids) - prefixes.num_lookahead_tokens)
        if not hit.num_tokens:
            raise ValueError(f"token_ids: {hit.why}")
        blocks, page = np.empty((0, layout.block_bytes), np.uint8), None
        if cache.blocks is not None:
            blocks = cache.blocks.rows.gather(hit.blocks).cpu().numpy()
        if cache.pages is not None:
            page = cache.pages.rows.gather([hit.page]).cpu().numpy()[0]
        known = ids[: hit.num_tokens + prefixes.num_lookahead_tokens]
        if not self._ranks.alone:
            path.mkdir(0o700, exist_ok=True)
            path /= _PART.format(rank=self._ranks.rank, size=self._ranks.size)
        write_whole(path, encode_prefix(layout, Prefix(0, keys.of(ids, hit.num_tokens), known, blocks, page)))
        return hit.num_tokens

    def _part(self, path: Path) -> Path:
        """Return the path of this rank's file. Raises PrefixRefused if another number of ranks exported it."""
        size = self._ranks.size
        names = [each.name for each in path.iterdir()] if path.is_dir() else []
        sizes = {1} if path.is_file() else {int(each[1]) for each in map(_PARTS.fullmatch, names) if each}
        if sizes and size not in sizes:
            exported = ", ".join(map(str, sorted(sizes)))
            raise PrefixRefused("foreign", f"{path}: is of an engine of {exported} ranks, and this one has {size}")
        return path if self._ranks.alone else path / _PART.format(rank=self._ranks.rank, size=size)

    def _read(self, path: Path, layout: RowLayout) -> Prefix:
        cache = self._cache
        prefix = read_prefix(self._part(path), layout, follow_symlinks=True)
        num_tokens, keys = len(prefix.token_ids) - layout.num_lookahead_tokens, PrefixKeys(layout.block_size)
        if num_tokens % layout.granularity:
            raise PrefixRefused("foreign", f"{path}: ends where no request can continue")
        if prefix.start or prefix.key != keys.of(prefix.token_ids, num_tokens):
            raise PrefixRefused("misnamed", f"{path}: its key is not that of its tokens")
        if cache.pages is not None and prefix.page is None:
            raise PrefixRefused("foreign", f"{path}: has no state after its tokens")
        return prefix

    @torch.inference_mode()
    def _add(self, prefix: Prefix, path: Path, layout: RowLayout) -> int:
        cache, fits = self._cache, True
        num_tokens, keys = len(prefix.token_ids) - layout.num_lookahead_tokens, PrefixKeys(layout.block_size)
        if cache.pages is not None and prefix.page is not None:
            fits = cache.pages.add([prefix.key], prefix.page[None])
        if cache.blocks is not None:
            names = cache.prefixes.block_keys(keys, prefix.token_ids, 0, len(prefix.blocks))
            fits = fits and cache.blocks.add(names, prefix.blocks)
        if not fits:
            raise ValueError(f"{path}: has {num_tokens} tokens, for which the caches have no free room")
        return num_tokens
