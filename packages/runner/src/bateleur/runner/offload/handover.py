"""Prefixes from one engine to another, by files: one of an engine that is alone, of several ranks a folder of parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.distributed.shared_errors import together
from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.device_cache import DeviceCache
from bateleur.runner.offload.layout import Layout
from bateleur.runner.offload.prefix_file import Prefix, read_prefix, write_prefix
from bateleur.runner.requests.prefix_keys import PrefixKeys

_PART = "{rank}-of-{size}.safetensors"
_PARTS = re.compile(r"\d+-of-(\d+)\.safetensors")


class Handover:
    """Of one engine, between two of its steps. All of its ranks are asked the same at once."""

    def __init__(self, cache: DeviceCache, layout: Callable[[], Layout], ranks: Ranks) -> None:
        """`layout`: asked for when it is needed, since it takes a while to know; a ValueError of it is passed on."""
        self._cache, self._get_layout, self._ranks = cache, layout, ranks

    @property
    def layout(self) -> Layout:
        """What its files are of."""
        return self._get_layout()

    def export(self, ids: NDArray[np.int32], path: Path) -> int:
        """Write the longest prefix of tokens `ids` that the caches have to a file, or of several ranks to a folder;
        its tokens are returned.

        It waits for the device. Raises ValueError if there is none, with the reason, and OSError for what can't be
        written: on all ranks, if it is so on one.
        """
        layout = self.layout
        return together(self._ranks, lambda: self._export(ids, path, layout))

    def take_in(self, path: Path) -> int:
        """Let requests find the prefix in a file, as if one had computed it here; its tokens are returned.

        What is here already stays, and what is added may be forgotten like anything that nobody holds. Raises
        PrefixRefused for a file that isn't an export of an engine like this one, and ValueError if so much can't be had
        of the caches: on all ranks, if it is so on one.
        """
        layout = self.layout
        prefix = together(self._ranks, lambda: self._read(path, layout))
        told = self._ranks.tell_all([int.from_bytes(prefix.key[:7], "big"), len(prefix.token_ids)])
        if any(each != told[0] for each in told):
            raise PrefixRefused("misnamed", f"{path}: its parts are of different prefixes")
        return together(self._ranks, lambda: self._add(prefix, path, layout))

    @torch.inference_mode()
    def _export(self, ids: NDArray[np.int32], path: Path, layout: Layout) -> int:
        cache = self._cache
        prefixes, keys = cache.prefixes, PrefixKeys(cache.prefixes.block_size)
        hit = prefixes.find(keys, ids, len(ids) - prefixes.ahead)
        if not hit.num_tokens:
            raise ValueError(f"token_ids: {hit.why}")
        blocks, page = np.empty((0, layout.block_bytes), np.uint8), None
        if cache.blocks is not None:
            blocks = cache.blocks.rows.gather(hit.blocks).cpu().numpy()
        if cache.pages is not None:
            page = cache.pages.rows.gather([hit.page]).cpu().numpy()[0]
        known = ids[: hit.num_tokens + prefixes.ahead]
        if not self._ranks.alone:
            path.mkdir(0o700, exist_ok=True)
            path /= _PART.format(rank=self._ranks.rank, size=self._ranks.size)
        write_prefix(path, layout, Prefix(0, keys.of(ids, hit.num_tokens), known, blocks, page))
        return hit.num_tokens

    def _part(self, path: Path) -> Path:
        """This rank's of what was exported. Raises PrefixRefused where so many ranks have not."""
        size = self._ranks.size
        of = {1} if path.is_file() else {int(each[1]) for each in map(_PARTS.fullmatch, _names(path)) if each}
        if of and size not in of:
            whose = ", ".join(map(str, sorted(of)))
            raise PrefixRefused("foreign", f"{path}: is of an engine of {whose} ranks, and here are {size}")
        return path if self._ranks.alone else path / _PART.format(rank=self._ranks.rank, size=size)

    def _read(self, path: Path, layout: Layout) -> Prefix:
        cache = self._cache
        prefix = read_prefix(self._part(path), layout, follow=True)
        num_tokens, keys = len(prefix.token_ids) - layout.ahead, PrefixKeys(cache.prefixes.block_size)
        if num_tokens % layout.granularity:
            raise PrefixRefused("foreign", f"{path}: ends where no request may go on")
        if prefix.start or prefix.key != keys.of(prefix.token_ids, num_tokens):
            raise PrefixRefused("misnamed", f"{path}: its key is not that of its tokens")
        if cache.pages is not None and prefix.page is None:
            raise PrefixRefused("foreign", f"{path}: holds no state behind its tokens")
        return prefix

    @torch.inference_mode()
    def _add(self, prefix: Prefix, path: Path, layout: Layout) -> int:
        cache, fits = self._cache, True
        num_tokens, keys = len(prefix.token_ids) - layout.ahead, PrefixKeys(cache.prefixes.block_size)
        if cache.pages is not None and prefix.page is not None:
            fits = cache.pages.add([prefix.key], prefix.page[None])
        if cache.blocks is not None:
            names = cache.prefixes.names(keys, prefix.token_ids, 0, len(prefix.blocks))
            fits = fits and cache.blocks.add(names, prefix.blocks)
        if not fits:
            raise ValueError(
                f"{path}: has {num_tokens} tokens, for which the caches have no room beside what runs"
            )
        return num_tokens


def _names(folder: Path) -> list[str]:
    """Of what is in it; [] of what is no folder."""
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []
