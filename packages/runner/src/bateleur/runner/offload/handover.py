"""Prefixes from one engine to another, by files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.device_cache import DeviceCache
from bateleur.runner.offload.layout import Layout
from bateleur.runner.offload.prefix_file import Prefix, read_prefix, write_prefix
from bateleur.runner.requests.prefix_keys import PrefixKeys


class Handover:
    """Of one engine, between two of its steps."""

    def __init__(self, cache: DeviceCache, layout: Callable[[], Layout]) -> None:
        """`layout`: asked for when it is needed, since it takes a while to know; a ValueError of it is passed on."""
        self._cache, self._get_layout = cache, layout

    @property
    def layout(self) -> Layout:
        """What its files are of."""
        return self._get_layout()

    @torch.inference_mode()
    def export(self, ids: NDArray[np.int32], path: Path) -> int:
        """Write the longest prefix of tokens `ids` that the caches have to a file; its tokens are returned.

        It waits for the device. Raises ValueError if there is none, with the reason, and OSError for what can't be
        written.
        """
        cache, layout = self._cache, self.layout
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
        write_prefix(path, layout, Prefix(0, keys.of(ids, hit.num_tokens), known, blocks, page))
        return hit.num_tokens

    @torch.inference_mode()
    def take_in(self, path: Path) -> int:
        """Let requests find the prefix in a file, as if one had computed it here; its tokens are returned.

        What is here already stays, and what is added may be forgotten like anything that nobody holds. Raises
        PrefixRefused for a file that isn't an export of an engine like this one, and ValueError if so much can't be had
        of the caches.
        """
        cache, layout = self._cache, self.layout
        prefix = read_prefix(path, layout, follow=True)
        num_tokens, keys = len(prefix.token_ids) - layout.ahead, PrefixKeys(cache.prefixes.block_size)
        if num_tokens % layout.granularity:
            raise PrefixRefused("foreign", f"{path}: ends where no request may go on")
        if prefix.start or prefix.key != keys.of(prefix.token_ids, num_tokens):
            raise PrefixRefused("misnamed", f"{path}: its key is not that of its tokens")
        if cache.pages is not None and prefix.page is None:
            raise PrefixRefused("foreign", f"{path}: holds no state behind its tokens")
        fits = True
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
