"""Division of a prefix into files: full segments of blocks, and endings.

A segment has `SEGMENT_BLOCKS` blocks and starts at a multiple of that many. Its file name identifies all tokens up to
its last block. An ending is a position at which a request can continue. Its file has the state there, if the model has
states, and the blocks since the last full segment. A prefix is read from its segment files and at most one ending.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.offload.rows import DeviceCache
from bateleur.runner.requests.prefix_keys import PrefixKeys

SEGMENT_BLOCKS = 16
KINDS = ("kv", "end")  # kinds of files: segments and endings


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The part of a prefix that one file holds: tokens [start, end). It is a segment (16 full blocks), or an ending
    (blocks after the last segment, and the state).

    key: prefix-cache key of all tokens before `end`. token_ids: tokens [start, end), and the next token if the blocks
    include a draft head's keys and values, which depend on it. blocks, page: prefix-cache keys of the blocks, and of
    the state at `end` (None for a segment, or without states).
    """

    start: int
    end: int
    name: str  # file name
    key: bytes
    token_ids: NDArray[np.int32]
    blocks: tuple[bytes, ...]
    page: bytes | None


class PrefixSpans:
    """The files of one prefix: the full blocks in the first `max_tokens` of the token ids `ids`.

    keys: prefix-cache keys of `ids`. If the KV blocks include a draft head's keys and values, these depend on the next
    token. Then `ids` must have one token more than the prefix.
    """

    def __init__(self, cache: DeviceCache, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> None:
        prefixes = cache.prefixes
        self.has_blocks, self._has_pages = cache.blocks is not None, cache.pages is not None
        self._keys, self._ids, self._num_lookahead_tokens = keys, ids, prefixes.num_lookahead_tokens
        self.block_size, self.granularity = prefixes.block_size, prefixes.granularity
        self.segment = SEGMENT_BLOCKS * self.block_size
        self.length = max(max_tokens, 0) // self.block_size * self.block_size  # tokens of full blocks
        self.blocks: list[bytes] = []  # prefix-cache keys of the blocks; empty without attention
        if self.has_blocks and self.length:
            self.blocks = prefixes.block_keys(keys, ids, 0, self.length // self.block_size)

    def segments(self) -> Iterator[FileSpan]:
        """Yield the parts of the prefix in files of full segments (16 blocks each), in order."""
        for end in range(self.segment, self.length + 1, self.segment) if self.has_blocks else ():
            yield self._span(end - self.segment, end, "kv")

    def files(self) -> list[str]:
        """Return the names of all files in which parts of the prefix may be."""
        return [each.name for each in (*self.segments(), *map(self.ending, self.ends()))]

    def page(self, end: int) -> bytes | None:
        """Return the prefix-cache key of the recurrent state after `end` tokens; None for a model without states."""
        return self._keys.of(self._ids, end) if self._has_pages else None

    def base(self, end: int) -> int:
        """Return the number of tokens in full segments (16 blocks each) before position `end`."""
        return end // self.segment * self.segment if self.has_blocks else end

    def ends(self) -> Iterator[int]:
        """Yield the numbers of tokens at which a request can continue, the largest first."""
        yield from range(self.length // self.granularity * self.granularity, 0, -self.granularity)

    def two_ends(self, prompt_len: int) -> set[int]:
        """Return the ends of the prefix that get a file each in a model without recurrent states: at most two.

        They are multiples of `self.granularity`: the last in the prefix, and the last below `prompt_len` (tokens),
        because a hit leaves a prompt token to compute. Ends of segments (16 blocks) have files and are left out.
        """
        size = self.granularity
        last = (self.length // size * size, min(prompt_len - 1, self.length) // size * size)
        return {end for end in last if self.base(end) < end}

    def ending(self, end: int) -> FileSpan:
        """Return the part between the last full segment (16 blocks) and position `end`, which has its own file."""
        return self._span(self.base(end), end, "end")

    def _span(self, start: int, end: int, kind: str) -> FileSpan:
        page = self.page(end) if kind == "end" else None
        blocks = self.blocks[start // self.block_size : end // self.block_size]
        key = self.blocks[end // self.block_size - 1] if self.has_blocks else self._keys.of(self._ids, end)
        ids = self._ids[start : end + self._num_lookahead_tokens]
        return FileSpan(start, end, f"{key.hex()}.{kind}.safetensors", key, ids, tuple(blocks), page)


def missing_spans(
    chain: PrefixSpans,
    has_block: Callable[[bytes], bool],
    has_page: Callable[[bytes], bool],
    has_file: Callable[[str], bool],
) -> list[FileSpan]:
    """Return the files to read, in order, for the longest prefix of `chain` that is completely in memory or files.
    has_block, has_page: whether device or host memory has the block or state of a key. has_file: whether a file exists.
    """
    wanted: list[FileSpan] = []
    count = 0  # blocks
    for span in chain.segments():
        if not all(map(has_block, span.blocks)):
            if not has_file(span.name):
                break
            wanted.append(span)
        count = span.end // chain.block_size
    while count < len(chain.blocks) and has_block(chain.blocks[count]):
        count += 1
    loaded_end = count * chain.block_size if chain.has_blocks else chain.length
    for end in chain.ends():
        base, page = chain.base(end), chain.page(end)
        if base > loaded_end:
            continue
        if end <= loaded_end and (page is None or has_page(page)):
            return [each for each in wanted if each.start < end]
        if has_file((span := chain.ending(end)).name):
            return [*(each for each in wanted if each.end <= base), span]
    return []
