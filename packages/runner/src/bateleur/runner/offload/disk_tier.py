"""The disk tier of the prefix cache: files written when requests end, and read into host memory for waiting requests.

One thread writes and one reads. The engine thread waits for them only if it has nothing else to do. The rows of host
memory that they use cannot be evicted meanwhile. Their results are collected between steps.

With several ranks, each has its own files and threads. The ranks first agree on all results that depend on these
(`_on_all_ranks`, `_gather`), so that they hold the same host memory and find the same prefixes. A file that one rank
lacks or can't read is a miss on all.
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
from bateleur.runner.offload.disk_folder import DiskFolder
from bateleur.runner.offload.host_memory import OffloadedRows
from bateleur.runner.offload.prefix_file import Prefix
from bateleur.runner.offload.rows import DeviceCache
from bateleur.runner.offload.spans import KINDS, FileSpan, PrefixSpans, missing_spans
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.requests.request import Request
from bateleur.runner.stats import OffloadStats
from bateleur.runner.utils.device import make_current

_log = logging.getLogger(__name__)
_BYTES_PER_STEP = 64 << 20
"""Bytes prepared for writing between two steps while requests run."""
_MAX_SPANS = 1 << 16
"""Maximum number of spans that wait to be written; the oldest ones are dropped."""
_SCAN_SECONDS = 5.0
"""Interval of scans for files of other processes."""
_STEPS = 16
"""Steps between two exchanges of ranks about finished writes, while requests run."""
_PENDING = -1
_REASONS = ("failed", "gone", "unreadable", "truncated", "corrupt", "foreign", "misnamed")

Read = tuple[int, PrefixRefused | None]
"""Number of files read, and the error of the next one, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A part of a prefix in one file, and the rows of host memory that a thread reads or writes for it."""

    span: FileSpan
    wanted: list[int]
    """Indices of the span's blocks to transfer."""
    blocks: list[int]
    """Rows of these blocks."""
    pages: list[int]
    """Row of the span's state, if it is transferred."""


class DiskTier:
    """The disk tier of the prefix cache: prefix files, which are read into and written from host memory."""

    def __init__(
        self,
        folder: DiskFolder,
        cache: DeviceCache,
        blocks: OffloadedRows | None,
        pages: OffloadedRows | None,
        stats: OffloadStats,
        ranks: Ranks,
    ) -> None:
        """blocks, pages: host memory of KV blocks and of recurrent states; None if the model has none of them.

        ranks: ranks that must find the same prefixes.
        """
        self._ranks, self._steps = ranks, 0
        self._folder, self._cache, self._stats = folder, cache, stats
        self._blocks, self._pages = blocks, pages
        stats.disk_bytes = folder.limit_bytes
        device = self._level.copies.device
        self._reader = ThreadPoolExecutor(1, "bateleur-offload-read", make_current, (device,))
        self._writer = ThreadPoolExecutor(1, "bateleur-offload-write", make_current, (device,))
        self._names = folder.names()
        """Known files."""
        self._bad: set[str] = set()
        """Unreadable files, which are not read again; the next request that computes their contents writes them again.
        """
        self._spans: deque[FileSpan] = deque()
        self._queued: set[str] = set()
        """Files being written or waiting to be written."""
        self._writes: list[tuple[_Transfer, Future[int]]] = []
        self._fetches: list[tuple[Request, list[_Transfer], Future[Read]]] = []
        self._scan: Future[set[str]] | None = None
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        self._warned: set[str] = set()

    # --- writing ------------------------------------------------------------------------------------------

    def save(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """Queue files with the caches of the first `num_tokens` tokens of an ended request, as far as memory allows.

        These tokens are in the prefix cache. Without states, files end at two positions: at the end of the
        request, and at the last position from which the same prompt could start again. `ids` must not be
        written to any more.
        """
        chain = PrefixSpans(self._cache, keys, ids, num_tokens)
        spans = list(chain.segments())
        for end in chain.ends():
            page = chain.page(end)
            if self._has_page(page) if page is not None else end in chain.two_ends(prompt_len):
                spans.append(chain.ending(end))
        known = self._on_all_ranks([span.name for span in spans])
        for span in spans:
            if span.name not in known and span.name not in self._queued:
                self._queued.add(span.name)
                self._spans.append(span)
        while len(self._spans) > _MAX_SPANS:
            self._queued.discard(self._spans.popleft().name)

    def advance(self, *, idle: bool) -> None:
        """Collect finished writes, and start queued ones: all if `idle`, else about `_BYTES_PER_STEP` bytes."""
        self._steps += 1
        if idle or self._ranks.alone or self._steps % _STEPS == 0:
            self._collect_writes()
        budget = float("inf") if idle else _BYTES_PER_STEP
        while self._spans and budget > 0:
            span = self._spans.popleft()
            transfer = self._hold(span)
            if transfer is None:
                self._queued.discard(span.name)
                self._stats.unwritten_files += 1
                continue
            event = self._level.copies.record()
            self._writes.append((transfer, self._writer.submit(self._write, transfer, event)))
            budget -= self._size(transfer)
        self._rescan()

    def _hold(self, span: FileSpan) -> _Transfer | None:
        """Return host rows with the contents of a file, copied from the device if needed and kept from eviction.

        None if the contents were evicted, or host memory has no room.
        """
        blocks = [] if self._blocks is None else self._blocks.hold(span.blocks)
        pages = [] if self._pages is None or span.page is None else self._pages.hold([span.page])
        if blocks is not None and pages is not None:
            return _Transfer(span, [*range(len(span.blocks))], blocks, pages)
        for level, rows in ((self._blocks, blocks), (self._pages, pages)):
            if level is not None and rows:
                level.host.release(rows)
        return None

    def _write(self, transfer: _Transfer, event: torch.cuda.Event | None) -> int:
        """Write a file, in the writing thread. Returns its size. event: end of the copies to host memory."""
        if event is not None:
            event.synchronize()
        blocks, page = np.empty((0, 0), np.uint8), None
        if self._blocks is not None:
            blocks = self._blocks.host.rows.numpy()[transfer.blocks]
        if self._pages is not None and transfer.pages:
            page = self._pages.host.rows.numpy()[transfer.pages[0]]
        span = transfer.span
        return self._folder.write(span.name, Prefix(span.start, span.key, span.token_ids, blocks, page))

    def _collect_writes(self) -> None:
        writes, self._writes = self._writes, []
        by_file = self._gather([_write_status(future) for _, future in writes])
        for (transfer, future), by_rank in zip(writes, by_file, strict=True):
            if _PENDING in by_rank:
                self._writes.append((transfer, future))
                continue
            self._release(transfer)
            name = transfer.span.name
            self._queued.discard(name)
            if future.exception() is None:
                self._names.add(name)
                self._bad.discard(name)
                self._stats.written_bytes += future.result()
            if not all(by_rank):
                self._stats.unwritten_files += 1
                error = future.exception() or f"see rank {by_rank.index(0)}"
                self._warn_once("unwritable", f"a prefix could not be written: {error}")

    # --- reading ------------------------------------------------------------------------------------------

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> bool:
        """Start to read files with the caches of up to `max_tokens` tokens of a request; returns whether any exist.

        The request then waits until `arrived` returns it.
        """
        if self._ranks.alone and not self._names:
            return False
        chain = PrefixSpans(self._cache, keys, ids, max_tokens)
        known = self._on_all_ranks([] if self._ranks.alone else chain.files())
        spans = missing_spans(chain, self._has_block, self._has_page, known.__contains__)
        transfers: list[_Transfer] = []
        for span in spans:
            if (transfer := self._reserve(span)) is None:
                break
            transfers.append(transfer)
        if transfers:
            future = self._reader.submit(self._read, transfers, self._level.copies.record())
            self._fetches.append((request, transfers, future))
        return bool(transfers)

    def _reserve(self, span: FileSpan) -> _Transfer | None:
        """Reserve host rows for those contents of a file that are not in memory; None if there is no room."""
        wanted = [i for i, key in enumerate(span.blocks) if not self._has_block(key)]
        blocks = [] if self._blocks is None else self._blocks.host.take([span.blocks[i] for i in wanted])
        if len(blocks) < len(wanted):
            return None
        pages: list[int] = []
        if self._pages is not None and span.page is not None and not self._has_page(span.page):
            pages = self._pages.host.take([span.page])
            if not pages:
                self._release(_Transfer(span, wanted, blocks, []))
                return None
        return _Transfer(span, wanted, blocks, pages)

    def _read(self, transfers: list[_Transfer], event: torch.cuda.Event | None) -> Read:
        """Read files into reserved host rows, in the reading thread. event: end of copies that use these rows."""
        if event is not None:
            event.synchronize()
        for count, transfer in enumerate(transfers):
            span = transfer.span
            try:
                prefix = self._folder.read(span.name, span.key)
                if (
                    len(prefix.blocks) != len(span.blocks)
                    or (prefix.page is None) != (span.page is None)
                    or prefix.start != span.start
                    or not np.array_equal(prefix.token_ids, span.token_ids)
                ):
                    raise PrefixRefused("misnamed", f"{span.name}: is of other tokens")
            except PrefixRefused as error:
                return count, error
            if self._blocks is not None and transfer.wanted:
                self._blocks.host.rows.numpy()[transfer.blocks] = prefix.blocks[transfer.wanted]
            if self._pages is not None and transfer.pages:
                self._pages.host.rows.numpy()[transfer.pages[0]] = prefix.page
        return len(transfers), None

    def arrived(self) -> list[Request]:
        """Return requests whose files were read, or could not be read, since the last call."""
        fetches, self._fetches, done = self._fetches, [], []
        by_fetch = self._gather([_read_status(future) for _, _, future in fetches])
        for (request, transfers, future), by_rank in zip(fetches, by_fetch, strict=True):
            least = min(by_rank)
            if least == _PENDING:
                self._fetches.append((request, transfers, future))
                continue
            count, reason = divmod(least, len(_REASONS))
            if count < len(transfers):
                rank = by_rank.index(least)
                error = f"see rank {rank}" if rank != self._ranks.rank else _read_error(future)
                self._refuse(_REASONS[reason], transfers[count:], f"{error}")
            for transfer in transfers[:count]:
                self._insert(transfer)
            for transfer in transfers:
                self._release(transfer)
            done.append(request)
        return done

    def _insert(self, transfer: _Transfer) -> None:
        span = transfer.span
        if self._blocks is not None:
            self._blocks.host.insert([span.blocks[i] for i in transfer.wanted], transfer.blocks)
        if self._pages is not None and span.page is not None and transfer.pages:
            self._pages.host.insert([span.page], transfer.pages)
        self._stats.disk_hit_tokens += span.end - span.start
        self._stats.read_bytes += self._size(transfer)

    def wait(self, seconds: float) -> None:
        """Wait until the files of some request were read, for at most `seconds`."""
        wait([future for _, _, future in self._fetches], seconds, FIRST_COMPLETED)

    # --- both ---------------------------------------------------------------------------------------------

    def _on_all_ranks(self, names: list[str]) -> Container[str]:
        """Return the files of `names` that all ranks have."""
        if self._ranks.alone:
            return self._names
        has = self._ranks.all_have([name in self._names for name in names])
        return {name for name, everywhere in zip(names, has, strict=True) if everywhere}

    def _gather(self, numbers: list[int]) -> list[tuple[int, ...]]:
        """All-gather numbers. Returns for each number its values on all ranks, in the order of ranks."""
        if self._ranks.alone or not numbers:
            return [(each,) for each in numbers]
        return list(zip(*self._ranks.gather_ints(numbers), strict=True))

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Remove the files that hold these KV blocks and states."""
        names = {f"{key.hex()}.{kind}.safetensors" for key in (*blocks, *pages) for kind in KINDS}
        self._names -= names
        self._bad |= names & self._queued
        self._spans = deque(each for each in self._spans if each.name not in names)
        self._writer.submit(self._folder.remove, sorted(names))

    def drain(self) -> None:
        """Write everything that waits to be written, and wait until it is written."""
        self.advance(idle=True)
        wait([future for _, future in self._writes])
        self._collect_writes()

    def _rescan(self) -> None:
        """Scan for files of other processes every few seconds, in a thread, and take the results of a finished scan."""
        if self._scan is not None and self._scan.done():
            self._names = (self._scan.result() | {each.span.name for each, _ in self._writes}) - self._bad
            self._scan, self._next_scan = None, time.monotonic() + _SCAN_SECONDS
        if self._scan is None and time.monotonic() > self._next_scan:
            self._scan = self._writer.submit(self._folder.names)

    @property
    def _level(self) -> OffloadedRows:
        """Host memory of blocks, or of states for a model without blocks."""
        level = self._blocks or self._pages
        assert level is not None
        return level

    def _has(self, level: OffloadedRows | None, key: bytes) -> bool:
        return level is not None and (key in level.host or bool(level.device.pool.find(key)))

    def _has_block(self, key: bytes) -> bool:
        return self._has(self._blocks, key)

    def _has_page(self, key: bytes) -> bool:
        return self._has(self._pages, key)

    def _size(self, transfer: _Transfer) -> int:
        levels = ((self._blocks, transfer.blocks), (self._pages, transfer.pages))
        return sum(len(rows) * level.device.rows.num_bytes for level, rows in levels if level is not None)

    def _release(self, transfer: _Transfer) -> None:
        for level, rows in ((self._blocks, transfer.blocks), (self._pages, transfer.pages)):
            if level is not None:
                level.host.release(rows[::-1])

    def _refuse(self, reason: str, transfers: list[_Transfer], message: str) -> None:
        """Mark files as bad after the first of them could not be read. The request computes their tokens instead."""
        names = {each.span.name for each in transfers}
        self._names -= names
        self._bad |= names
        self._stats.refused[reason] += 1
        self._warn_once(reason, f"a prefix file is ignored, and its tokens are computed: {message}")

    def _warn_once(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s", message)


def _write_status(future: Future[int]) -> int:
    """Return the state of a write as a number for other ranks: pending (-1), failed (0) or done (1)."""
    return int(future.exception() is None) if future.done() else _PENDING


def _read_status(future: Future[Read]) -> int:
    """Return the state of a read as a number for other ranks: -1 while pending, else files read and kind of error.

    The rank that read fewest files has the lowest number.
    """
    if not future.done():
        return _PENDING
    if future.exception() is not None:
        return 0
    count, error = future.result()
    return count * len(_REASONS) + (0 if error is None else _REASONS.index(error.reason))


def _read_error(future: Future[Read]) -> BaseException | None:
    return future.exception() or future.result()[1]
