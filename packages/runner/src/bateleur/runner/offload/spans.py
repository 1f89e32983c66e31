"""Which files a prefix is made of: whole segments of blocks, and ends, a state with the blocks in front of it.

A segment has `SEGMENT_BLOCKS` blocks and begins at a multiple of as many; its file is called after its last block, so
after all tokens up to there. An end is where a request may go on: its file holds the state there, if the model has any,
and the blocks since the last whole segment. So a prefix of t tokens is t // segment files, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.offload.device_cache import DeviceCache
from bateleur.runner.requests.prefix_keys import PrefixKeys

SEGMENT_BLOCKS = 16
KINDS = ("kv", "end")
"""Of files: segments, and ends."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one file holds of a prefix."""

    start: int
    """Tokens before it."""
    end: int
    """And with it."""
    name: str
    """Of its file."""
    key: bytes
    """What its file is of, and says."""
    token_ids: NDArray[np.int32]
    """Of its blocks, and behind them as far as they depend on it."""
    blocks: tuple[bytes, ...]
    """What its blocks are published as."""
    page: bytes | None
    """What the state at its end is published as; None for a segment, or without states."""


class Chain:
    """The spans of one prefix.

    Args:
        cache: whose prefixes.
        keys: names of the prefixes of `ids`.
        most: tokens that may be part of it; where blocks depend on the token behind them, it is among `ids`.
    """

    def __init__(self, cache: DeviceCache, keys: PrefixKeys, ids: NDArray[np.int32], most: int) -> None:
        prefixes = cache.prefixes
        self._has_blocks, self._has_pages = cache.blocks is not None, cache.pages is not None
        self._keys, self._ids, self._ahead = keys, ids, prefixes.ahead
        self.block_size, self.granularity = prefixes.block_size, prefixes.granularity
        self.segment = SEGMENT_BLOCKS * self.block_size
        self.length = max(most, 0) // self.block_size * self.block_size
        """Tokens of whole blocks."""
        self.blocks: list[bytes] = []
        """What its blocks are published as; none without attention."""
        if self._has_blocks and self.length:
            self.blocks = prefixes.names(keys, ids, 0, self.length // self.block_size)

    def segments(self) -> Iterator[Span]:
        """All whole ones, in order."""
        for end in range(self.segment, self.length + 1, self.segment) if self._has_blocks else ():
            yield self._span(end - self.segment, end, "kv")

    def files(self) -> list[str]:
        """Names of all that it may be made of."""
        return [each.name for each in (*self.segments(), *map(self.ending, self.ends()))]

    def page(self, end: int) -> bytes | None:
        """What the state behind so many tokens is published as."""
        return self._keys.of(self._ids, end) if self._has_pages else None

    def base(self, end: int) -> int:
        """Tokens of the whole segments before an end."""
        return end // self.segment * self.segment if self._has_blocks else end

    def ends(self) -> Iterator[int]:
        """Where a request may go on, the longest first."""
        yield from range(self.length // self.granularity * self.granularity, 0, -self.granularity)

    def two_ends(self, prompt_len: int) -> set[int]:
        """The last of all, and of those with a token of the prompt behind them, but where a segment ends."""
        size = self.granularity
        last = (self.length // size * size, min(prompt_len - 1, self.length) // size * size)
        return {end for end in last if self.base(end) < end}

    def ending(self, end: int) -> Span:
        """The file of an end."""
        return self._span(self.base(end), end, "end")

    @property
    def has_blocks(self) -> bool:
        """Whether the model has attention."""
        return self._has_blocks

    def _span(self, start: int, end: int, kind: str) -> Span:
        page = self.page(end) if kind == "end" else None
        blocks = self.blocks[start // self.block_size : end // self.block_size]
        key = self.blocks[end // self.block_size - 1] if self._has_blocks else self._keys.of(self._ids, end)
        ids = self._ids[start : end + self._ahead]
        return Span(start, end, f"{key.hex()}.{kind}.safetensors", key, ids, tuple(blocks), page)


def missing_spans(
    chain: Chain,
    has_block: Callable[[bytes], bool],
    has_page: Callable[[bytes], bool],
    has_file: Callable[[str], bool],
) -> list[Span]:
    """The files to read, in order, for the longest prefix of which everything is in memory or in files."""
    wanted: list[Span] = []
    count = 0  # blocks
    for span in chain.segments():
        if not all(map(has_block, span.blocks)):
            if not has_file(span.name):
                break
            wanted.append(span)
        count = span.end // chain.block_size
    while count < len(chain.blocks) and has_block(chain.blocks[count]):
        count += 1
    reach = count * chain.block_size if chain.has_blocks else chain.length
    for end in chain.ends():
        base, page = chain.base(end), chain.page(end)
        if base > reach:
            continue
        if end <= reach and (page is None or has_page(page)):
            return [each for each in wanted if each.start < end]
        if has_file((span := chain.ending(end)).name):
            return [*(each for each in wanted if each.end <= base), span]
    return []
