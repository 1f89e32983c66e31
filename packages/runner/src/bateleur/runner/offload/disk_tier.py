"""Prefixes on a disk: written when requests end, and read into host memory before one that asks for them gets a row.

Two threads read and write; the engine's never waits for them while it has something to compute. Host memory that they
work on is held, so that nobody else writes there; what came of it is taken in between steps.

Of several ranks each has files of its own, and its own opinion of which there are and how far its threads have come.
Whatever follows from these is agreed on first (`_common`, `_done`), so that all hold the same host memory and find the
same: what one lacks, or cannot read, is a miss for all.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Container
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.device_cache import DeviceCache
from bateleur.runner.offload.disk_folder import DiskFolder
from bateleur.runner.offload.level import Level
from bateleur.runner.offload.prefix_file import Prefix
from bateleur.runner.offload.spans import KINDS, Chain, Span, missing_spans
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.stats import OffloadStats
from bateleur.runner.utils.device import make_current

_log = logging.getLogger(__name__)
_BYTES_PER_STEP = 64 << 20
"""Made ready to be written between two steps, while requests run."""
_MOST_SPANS = 1 << 16
"""That wait to be written; of more, the oldest are given up."""
_SCAN_SECONDS = 5.0
"""Between looks at what other processes wrote."""
_STEPS = 16
"""Between two exchanges of ranks about what is written, while requests run."""
_PENDING = -1
_REASONS = ("failed", "gone", "unreadable", "truncated", "corrupt", "foreign", "misnamed")

Read = tuple[int, PrefixRefused | None]
"""How many files were read, and what is wrong with the next one, if anything is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A span, and the host memory that a thread reads or writes for it."""

    span: Span
    wanted: list[int]
    """Of its blocks, those that are meant, by index."""
    blocks: list[int]
    """Their rows."""
    pages: list[int]
    """The row of its page, if that is meant."""


class DiskTier:
    """Files below host memory."""

    def __init__(
        self,
        folder: DiskFolder,
        cache: DeviceCache,
        blocks: Level | None,
        pages: Level | None,
        stats: OffloadStats,
        ranks: Ranks,
    ) -> None:
        """blocks, pages: host memory, and the device above it; None where there are none. ranks: who must find the
        same."""
        self._ranks, self._steps = ranks, 0
        self._folder, self._cache, self._blocks, self._pages, self._stats = (
            folder,
            cache,
            blocks,
            pages,
            stats,
        )
        stats.disk_bytes = folder.limit_bytes
        device = self._level.copies.device
        self._reader = ThreadPoolExecutor(1, "bateleur-offload-read", make_current, (device,))
        self._writer = ThreadPoolExecutor(1, "bateleur-offload-write", make_current, (device,))
        self._names = folder.names()
        """Files that there are, as far as is known."""
        self._bad: set[str] = set()
        """Of these, what must not be read again: it is written anew when it is next computed."""
        self._spans: deque[Span] = deque()
        self._queued: set[str] = set()
        """Files that are being written, or wait for it."""
        self._writes: list[tuple[_Work, Future[int]]] = []
        self._fetches: list[tuple[Request, list[_Work], Future[Read]]] = []
        self._scan: Future[set[str]] | None = None
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        self._told: set[str] = set()

    # --- writing ------------------------------------------------------------------------------------------

    def leave(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """A request has ended of which so much was published: what has no file gets one, as far as memory allows.

        Where there are no states, that has two ends: where the request came to, and where its prompt asked again
        could begin. Nobody writes to `ids` from now on.
        """
        chain = Chain(self._cache, keys, ids, num_tokens)
        spans = list(chain.segments())
        for end in chain.ends():
            page = chain.page(end)
            if self._has_page(page) if page is not None else end in chain.two_ends(prompt_len):
                spans.append(chain.ending(end))
        known = self._common([span.name for span in spans])
        for span in spans:
            if span.name not in known and span.name not in self._queued:
                self._queued.add(span.name)
                self._spans.append(span)
        while len(self._spans) > _MOST_SPANS:
            self._queued.discard(self._spans.popleft().name)

    def advance(self, *, idle: bool) -> None:
        """Take in what is done, and make ready what waits: a bounded part of it while requests run."""
        self._steps += 1
        if idle or self._ranks.alone or self._steps % _STEPS == 0:
            self._take_in_writes()
        budget = float("inf") if idle else _BYTES_PER_STEP
        while self._spans and budget > 0:
            span = self._spans.popleft()
            work = self._held(span)
            if work is None:
                self._queued.discard(span.name)
                self._stats.unwritten_files += 1
                continue
            event = self._mark()
            self._writes.append((work, self._writer.submit(self._write, work, event)))
            budget -= self._size(work)
        self._look()

    def _held(self, span: Span) -> _Work | None:
        """Rows of all that a span has, which are copied from the device where they aren't here; None if there is
        something of which nobody knows any more, or no room."""
        blocks = [] if self._blocks is None else self._blocks.held(span.blocks)
        pages = [] if self._pages is None or span.page is None else self._pages.held([span.page])
        if blocks is not None and pages is not None:
            return _Work(span, [*range(len(span.blocks))], blocks, pages)
        for level, rows in ((self._blocks, blocks), (self._pages, pages)):
            if level is not None and rows:
                level.host.release(rows)
        return None

    def _write(self, work: _Work, event: torch.cuda.Event | None) -> int:
        """In the writing thread."""
        if event is not None:
            event.synchronize()
        blocks, page = np.empty((0, 0), np.uint8), None
        if self._blocks is not None:
            blocks = self._blocks.host.rows.numpy()[work.blocks]
        if self._pages is not None and work.pages:
            page = self._pages.host.rows.numpy()[work.pages[0]]
        span = work.span
        return self._folder.write(span.name, Prefix(span.start, span.key, span.token_ids, blocks, page))

    def _take_in_writes(self) -> None:
        writes, self._writes = self._writes, []
        came = self._told_by_all([_of_write(future) for _, future in writes])
        for (work, future), told in zip(writes, came, strict=True):
            if _PENDING in told:
                self._writes.append((work, future))
                continue
            self._release(work)
            name = work.span.name
            self._queued.discard(name)
            if future.exception() is None:
                self._names.add(name)
                self._bad.discard(name)
                self._stats.written_bytes += future.result()
            if not all(told):
                self._stats.unwritten_files += 1
                error = future.exception() or f"rank {told.index(0)} says why"
                self._tell("unwritable", f"a prefix could not be written: {error}")

    # --- reading ------------------------------------------------------------------------------------------

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], most: int) -> bool:
        """Whether files are read for a request of these tokens, which then waits until it has `arrived`."""
        if self._ranks.alone and not self._names:
            return False
        chain = Chain(self._cache, keys, ids, most)
        known = self._common([] if self._ranks.alone else chain.files())
        spans = missing_spans(chain, self._has_block, self._has_page, known.__contains__)
        works: list[_Work] = []
        for span in spans:
            if (work := self._taken(span)) is None:
                break
            works.append(work)
        if works:
            future = self._reader.submit(self._read, works, self._mark())
            self._fetches.append((request, works, future))
        return bool(works)

    def _taken(self, span: Span) -> _Work | None:
        """Rows for what memory lacks of a span; None if there is no room."""
        wanted = [i for i, key in enumerate(span.blocks) if not self._has_block(key)]
        blocks = [] if self._blocks is None else self._blocks.host.take([span.blocks[i] for i in wanted])
        if len(blocks) < len(wanted):
            return None
        pages: list[int] = []
        if self._pages is not None and span.page is not None and not self._has_page(span.page):
            pages = self._pages.host.take([span.page])
            if not pages:
                self._release(_Work(span, wanted, blocks, []))
                return None
        return _Work(span, wanted, blocks, pages)

    def _read(self, works: list[_Work], event: torch.cuda.Event | None) -> Read:
        """In the reading thread."""
        if event is not None:
            event.synchronize()
        for count, work in enumerate(works):
            span = work.span
            try:
                prefix = self._folder.read(span.name, span.key)
                whole = len(prefix.blocks) == len(span.blocks) and (prefix.page is None) == (
                    span.page is None
                )
                if (
                    not whole
                    or prefix.start != span.start
                    or not np.array_equal(prefix.token_ids, span.token_ids)
                ):
                    raise PrefixRefused("misnamed", f"{span.name}: is of other tokens")
            except PrefixRefused as error:
                return count, error
            if self._blocks is not None and work.wanted:
                self._blocks.host.rows.numpy()[work.blocks] = prefix.blocks[work.wanted]
            if self._pages is not None and work.pages:
                self._pages.host.rows.numpy()[work.pages[0]] = prefix.page
        return len(works), None

    def arrived(self) -> list[Request]:
        """Requests that need not wait any longer, whatever came of it."""
        fetches, self._fetches, done = self._fetches, [], []
        came = self._told_by_all([_of_read(future) for _, _, future in fetches])
        for (request, works, future), told in zip(fetches, came, strict=True):
            least = min(told)
            if least == _PENDING:
                self._fetches.append((request, works, future))
                continue
            count, reason = divmod(least, len(_REASONS))
            if count < len(works):
                first = told.index(least)
                error = f"rank {first} says why" if first != self._ranks.rank else _error_of_read(future)
                self._refuse(_REASONS[reason], works[count:], f"{error}")
            for work in works[:count]:
                self._publish(work)
            for work in works:
                self._release(work)
            done.append(request)
        return done

    def _publish(self, work: _Work) -> None:
        span = work.span
        if self._blocks is not None:
            self._blocks.host.publish([span.blocks[i] for i in work.wanted], work.blocks)
        if self._pages is not None and span.page is not None and work.pages:
            self._pages.host.publish([span.page], work.pages)
        self._stats.disk_hit_tokens += span.end - span.start
        self._stats.read_bytes += self._size(work)

    def wait(self, seconds: float) -> None:
        """Until files have come here for a request, or so long."""
        wait([future for _, _, future in self._fetches], seconds, FIRST_COMPLETED)

    # --- both ---------------------------------------------------------------------------------------------

    def _common(self, names: list[str]) -> Container[str]:
        """Of these files those that all ranks have, as far as they know."""
        if self._ranks.alone:
            return self._names
        has = self._ranks.all_have([name in self._names for name in names])
        return {name for name, everywhere in zip(names, has, strict=True) if everywhere}

    def _told_by_all(self, numbers: list[int]) -> list[tuple[int, ...]]:
        """By rank, each of these numbers."""
        if self._ranks.alone or not numbers:
            return [(each,) for each in numbers]
        return list(zip(*self._ranks.tell_all(numbers), strict=True))

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Nobody is to find what these are part of."""
        names = {f"{key.hex()}.{kind}.safetensors" for key in (*blocks, *pages) for kind in KINDS}
        self._names -= names
        self._bad |= names & self._queued
        self._spans = deque(each for each in self._spans if each.name not in names)
        self._writer.submit(self._folder.remove, sorted(names))

    def drain(self) -> None:
        """Write what waits for it, and wait until it is written."""
        self.advance(idle=True)
        wait([future for _, future in self._writes])
        self._take_in_writes()

    def _look(self) -> None:
        """Now and then, at what other processes wrote."""
        if self._scan is not None and self._scan.done():
            self._names = (self._scan.result() | {work.span.name for work, _ in self._writes}) - self._bad
            self._scan, self._next_scan = None, time.monotonic() + _SCAN_SECONDS
        if self._scan is None and time.monotonic() > self._next_scan:
            self._scan = self._writer.submit(self._folder.names)

    @property
    def _level(self) -> Level:
        """One of those that there are; both have the same `copies`."""
        level = self._blocks or self._pages
        assert level is not None
        return level

    def _mark(self) -> torch.cuda.Event | None:
        return self._level.copies.mark()

    def _has(self, level: Level | None, key: bytes) -> bool:
        return level is not None and (key in level.host or bool(level.device.pool.find(key)))

    def _has_block(self, key: bytes) -> bool:
        return self._has(self._blocks, key)

    def _has_page(self, key: bytes) -> bool:
        return self._has(self._pages, key)

    def _size(self, work: _Work) -> int:
        levels = ((self._blocks, work.blocks), (self._pages, work.pages))
        return sum(len(rows) * level.device.rows.num_bytes for level, rows in levels if level is not None)

    def _release(self, work: _Work) -> None:
        for level, rows in ((self._blocks, work.blocks), (self._pages, work.pages)):
            if level is not None:
                level.host.release(rows[::-1])

    def _refuse(self, reason: str, works: list[_Work], message: str) -> None:
        """The first of these can't be read; with it the request computes the others, too, which are written anew."""
        names = {work.span.name for work in works}
        self._names -= names
        self._bad |= names
        self._stats.refused[reason] += 1
        self._tell(reason, f"a prefix on the disk is passed over, and computed: {message}")

    def _tell(self, reason: str, message: str) -> None:
        """Once for each reason; the rest is counted."""
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s", message)


def _of_write(future: Future[int]) -> int:
    """What ranks tell each other of it."""
    return int(future.exception() is None) if future.done() else _PENDING


def _of_read(future: Future[Read]) -> int:
    """The same: how many files were read here, and what is wrong with the next; less is worse."""
    if not future.done():
        return _PENDING
    if future.exception() is not None:
        return 0
    count, error = future.result()
    return count * len(_REASONS) + (0 if error is None else _REASONS.index(error.reason))


def _error_of_read(future: Future[Read]) -> BaseException | None:
    return future.exception() or future.result()[1]
