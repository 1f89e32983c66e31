"""The disk tier of the prefix cache: files written when requests end, and read into host memory for waiting requests.

One thread writes and one reads. The engine thread waits for them only if it has nothing else to do. The rows of host
memory that they use cannot be evicted meanwhile. Their results are collected between steps.

With several ranks, each has its own files and threads. The ranks first agree on all results that depend on files or
threads (`_on_all_ranks`, `_gather`), so that they hold the same host memory and find the same prefixes. A file that
one rank lacks or can't read is a miss on all.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
from bateleur.runner.utils.device import make_current

_log = logging.getLogger(__name__)
_BYTES_PER_STEP = 64 << 20  # bytes prepared for writing between two steps while requests run
_MAX_SPANS = 1 << 16  # maximum number of spans that wait to be written; the oldest ones are dropped
_SCAN_SECONDS = 5.0  # interval of scans for files of other processes
_STEPS = 16  # steps between two exchanges of ranks about finished writes, while requests run
_PENDING = -1
_REASONS = ("failed", "gone", "unreadable", "truncated", "corrupt", "foreign", "misnamed")

Read = tuple[int, PrefixRefused | None]  # number of files read, and the error of the next one, if any


class _Rows(NamedTuple):
    """Rows of host memory for KV blocks, or for the state, of one file.

    level: host memory of blocks or of states. wanted: indices of `keys` among all blocks (or states) of the file.
    """

    level: OffloadedRows
    wanted: list[int]  # indices of the keys among the span's blocks, or [0] for its state
    keys: list[bytes]
    rows: list[int]


@dataclass(slots=True, eq=False)
class _Transfer:
    """A part of a prefix in one file, and the rows of host memory that a thread reads or writes for it.

    forgotten: whether `forget` was called for the file after the transfer started. Its result is then not used.
    """

    span: FileSpan
    parts: list[_Rows]
    forgotten: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(len(part.rows) * part.level.device.rows.num_bytes for part in self.parts)


class DiskTier:
    """The disk tier of the prefix cache: prefix files, which are read into and written from host memory."""

    def __init__(
        self,
        folder: DiskFolder,
        cache: DeviceCache,
        blocks: OffloadedRows | None,
        pages: OffloadedRows | None,
        ranks: Ranks,
    ) -> None:
        """blocks, pages: host memory of KV blocks and states. ranks: ranks that must find the same prefixes."""
        level = blocks or pages
        assert level is not None
        self._folder, self._cache, self._blocks, self._pages, self._ranks = folder, cache, blocks, pages, ranks
        self._copies, self._stats, self._steps = level.copies, level.stats, 0
        self._stats.disk_bytes = folder.limit_bytes
        self._reader, self._writer = (
            ThreadPoolExecutor(1, f"bateleur-offload-{name}", make_current, (self._copies.device,))
            for name in ("read", "write")
        )
        self._names = folder.names()  # known files
        self._bad: set[str] = set()  # unreadable files, which are not read but may be written again
        self._changes: dict[str, bool] = {}  # since the last scan began: files written (True) or forgotten (False)
        # A file name is in at most one of these two. A plain dict is slow to find its first entry after many removals.
        self._waiting: OrderedDict[str, FileSpan] = OrderedDict()  # to be written
        self._writes: dict[str, tuple[_Transfer, Future[int]]] = {}  # being written
        self._fetches: list[tuple[Request, list[_Transfer], Future[Read]]] = []
        self._scan: Future[set[str]] | None = None
        self._next_scan = time.monotonic() + _SCAN_SECONDS
        self._warned: set[str] = set()

    def save(self, keys: PrefixKeys, ids: NDArray[np.int32], num_tokens: int, prompt_len: int) -> None:
        """Queue files with the caches of the first `num_tokens` tokens of an ended request, as far as memory allows.

        There is a file for each full segment (16 blocks), and one that ends at each state on the device or in host
        memory. Without states, there is instead a file for the end of the request, and one for the longest prefix that
        a request with the same prompt can reuse, see `PrefixSpans.two_ends`.
        ids: token ids, which must not be written to any more. keys: their prefix-cache keys. prompt_len: prompt tokens.
        """
        chain = PrefixSpans(self._cache, keys, ids, num_tokens)
        spans = list(chain.segments())
        for end in chain.ends():
            page = chain.page(end)
            if _has(self._pages, page) if page is not None else end in chain.two_ends(prompt_len):
                spans.append(chain.ending(end))
        known = self._on_all_ranks([span.name for span in spans])
        for span in spans:
            if span.name not in known and span.name not in self._writes:
                self._waiting.setdefault(span.name, span)
        while len(self._waiting) > _MAX_SPANS:
            self._waiting.popitem(last=False)

    def advance(self, *, idle: bool) -> None:
        """Collect finished writes, and start queued ones: all if `idle`, else about `_BYTES_PER_STEP` bytes."""
        self._steps += 1
        if idle or self._ranks.alone or self._steps % _STEPS == 0:
            self._collect_writes()
        budget = float("inf") if idle else _BYTES_PER_STEP
        while self._waiting and budget > 0:
            name, span = self._waiting.popitem(last=False)
            if (transfer := self._transfer(span, reserve=False)) is None:
                self._stats.unwritten_files += 1
                continue
            self._writes[name] = transfer, self._writer.submit(self._write, transfer, self._copies.record())
            budget -= transfer.num_bytes
        self._rescan()

    def _write(self, transfer: _Transfer, event: torch.cuda.Event | None) -> int:
        """Write a file, in the writing thread. Returns its size. event: end of the copies to host memory."""
        if event is not None:
            event.synchronize()
        span, blocks, page = transfer.span, np.empty((0, 0), np.uint8), None
        for part in transfer.parts:
            rows = part.level.rows.numpy()[part.rows]
            if part.level is self._blocks:
                blocks = rows
            else:
                page = rows[0]
        return self._folder.write(span.name, Prefix(span.start, span.key, span.token_ids, blocks, page))

    def _collect_writes(self) -> None:
        writes, self._writes = self._writes, {}
        by_file = self._gather(  # 0: failed, 1: done
            [int(each.exception() is None) if each.done() else _PENDING for _, each in writes.values()]
        )
        for (name, (transfer, future)), by_rank in zip(writes.items(), by_file, strict=True):
            if _PENDING in by_rank:
                self._writes[name] = transfer, future
                continue
            _release(transfer.parts)
            if future.exception() is None:
                self._stats.written_bytes += future.result()
                if not transfer.forgotten:
                    self._names.add(name)
                    self._changes[name] = True
                    self._bad.discard(name)
            if not all(by_rank):
                self._stats.unwritten_files += 1
                error = future.exception() or f"see rank {by_rank.index(0)}"
                self._warn_once("unwritable", f"a prefix could not be written: {error}")

    def fetch(self, request: Request, keys: PrefixKeys, ids: NDArray[np.int32], max_tokens: int) -> bool:
        """Start to read files with a prefix of a request into host memory.

        keys: prefix-cache keys of the token ids `ids`. max_tokens: maximum tokens of the prefix.
        Returns whether files are read, so that `arrived` will return the request.
        """
        if self._ranks.alone and not self._names:
            return False
        chain = PrefixSpans(self._cache, keys, ids, max_tokens)
        known = self._on_all_ranks([] if self._ranks.alone else chain.files())
        has_block, has_page = partial(_has, self._blocks), partial(_has, self._pages)
        transfers: list[_Transfer] = []
        for span in missing_spans(chain, has_block, has_page, known.__contains__):
            if (transfer := self._transfer(span, reserve=True)) is None:
                break
            transfers.append(transfer)
        if transfers:
            future = self._reader.submit(self._read, transfers, self._copies.record())
            self._fetches.append((request, transfers, future))
        return bool(transfers)

    def _read(self, transfers: list[_Transfer], event: torch.cuda.Event | None) -> Read:
        """Read files into reserved host rows, in the reading thread. event: end of copies that use these rows.

        Returns how many files were read, and the error of the next one, if any.
        """
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
            for part in transfer.parts:
                read = prefix.blocks[part.wanted] if part.level is self._blocks else prefix.page
                part.level.rows.numpy()[part.rows] = read
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
            if count < len(transfers) and not transfers[count].forgotten:
                rank = by_rank.index(least)
                own = rank == self._ranks.rank
                error = (future.exception() or future.result()[1]) if own else f"see rank {rank}"
                self._refuse(_REASONS[reason], transfers[count:], f"{error}")
            for transfer in transfers[:count]:
                if transfer.forgotten:
                    continue
                for part in transfer.parts:
                    part.level.insert(part.keys, part.rows)
                self._stats.disk_hit_tokens += transfer.span.end - transfer.span.start
                self._stats.read_bytes += transfer.num_bytes
            for transfer in transfers:
                _release(transfer.parts)
            done.append(request)
        return done

    def wait(self, seconds: float) -> None:
        """Wait until the files of some request were read, for at most `seconds`."""
        wait([future for _, _, future in self._fetches], seconds, FIRST_COMPLETED)

    def _transfer(self, span: FileSpan, *, reserve: bool) -> _Transfer | None:
        """Return host rows for a file, kept from eviction; None if host memory has no room.

        reserve: reserve rows to read into, for contents that are not in memory. Otherwise return the rows that have the
        contents, copied from the device if needed, or None if some contents were evicted.
        """
        parts: list[_Rows] = []
        for level, keys in ((self._blocks, span.blocks), (self._pages, () if span.page is None else (span.page,))):
            wanted = [i for i, key in enumerate(keys) if not (reserve and _has(level, key))]
            if level is None or not wanted:
                continue
            names = [keys[i] for i in wanted]
            rows = level.take(names) if reserve else level.hold(names)
            if not rows:
                _release(parts)
                return None
            parts.append(_Rows(level, wanted, names, rows))
        return _Transfer(span, parts)

    def _on_all_ranks(self, names: list[str]) -> Container[str]:
        """Return the files of `names` that all ranks have."""
        if self._ranks.alone:
            return self._names
        has = self._ranks.all_have([name in self._names for name in names])
        return {name for name, everywhere in zip(names, has, strict=True) if everywhere}

    def _gather(self, numbers: list[int]) -> list[tuple[int, ...]]:
        """All-gather numbers. Returns for each number its values on all ranks, in the order of ranks."""
        return list(zip(*self._ranks.gather_ints(numbers), strict=True)) if numbers else []

    def forget(self, blocks: list[bytes], pages: list[bytes]) -> None:
        """Remove the files of KV blocks and states (pages), given by prefix-cache keys.

        They are not found from now on, although the removal waits for earlier writes and scans in the writing thread.
        """
        names = {f"{key.hex()}.{kind}.safetensors" for key in (*blocks, *pages) for kind in KINDS}
        self._names -= names
        self._changes |= dict.fromkeys(names, False)
        for name in names:
            self._waiting.pop(name, None)
        reads = [transfer for _, transfers, _ in self._fetches for transfer in transfers]
        for transfer in (*reads, *(each for each, _ in self._writes.values())):
            transfer.forgotten |= transfer.span.name in names
        self._writer.submit(self._folder.remove, sorted(names))

    def drain(self) -> None:
        """Write everything that waits to be written, and wait until it is written."""
        self.advance(idle=True)
        wait([future for _, future in self._writes.values()])
        self._collect_writes()

    def _rescan(self) -> None:
        """Scan for files of other processes every few seconds, in a thread, and take the results of a finished scan."""
        if self._scan is not None and self._scan.done():
            written = {name for name, exists in self._changes.items() if exists}
            self._names = ((self._scan.result() - self._changes.keys()) | written) - self._bad
            self._scan, self._next_scan = None, time.monotonic() + _SCAN_SECONDS
        if self._scan is None and time.monotonic() > self._next_scan:
            self._changes = {}
            self._scan = self._writer.submit(self._folder.names)

    def _refuse(self, reason: str, transfers: list[_Transfer], message: str) -> None:
        """Mark the files of all `transfers` as bad, and count and log the error.

        The first file could not be read. The others follow it in the same prefix. The engine computes their tokens.
        reason: kind of error, one of `_REASONS`. message: logged at the first error of this kind.
        """
        names = {each.span.name for each in transfers}
        self._names -= names
        self._bad |= names
        self._stats.refused[reason] += 1
        self._warn_once(reason, f"a prefix file is ignored, and its tokens are computed: {message}")

    def _warn_once(self, reason: str, message: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s", message)


def _has(level: OffloadedRows | None, key: bytes) -> bool:
    return level is not None and (key in level or bool(level.device.pool.find(key)))


def _release(parts: list[_Rows]) -> None:
    for part in parts:
        part.level.release(part.rows[::-1])


def _read_status(future: Future[Read]) -> int:
    """Return the state of a read as one number: -1 while pending, else `files read * len(_REASONS) + error`.

    error: index in `_REASONS`; 0 if there is none. So the lowest number of all ranks is that of the fewest files read.
    """
    if not future.done():
        return _PENDING
    if future.exception() is not None:
        return 0
    count, error = future.result()
    return count * len(_REASONS) + (0 if error is None else _REASONS.index(error.reason))
