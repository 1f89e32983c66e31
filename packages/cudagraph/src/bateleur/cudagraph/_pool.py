"""Memory that all recordings of one backend share, as CUDA graphs share a private pool of torch's allocator."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

BLOCK_BYTES = 512
"""Sizes are multiples of this, as in torch's CUDA allocator."""


class _Span(NamedTuple):
    """Bytes first .. last - 1 of one segment."""

    segment: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first


class Pool:
    """CPU memory that goes back to the pool when the storage that got it dies.

    A model of the private pool that CUDA graphs allocate from. A request takes the smallest free span that fits and
    leaves the rest of the span free. Free neighbours are joined. A request that fits nowhere gets a new segment of its
    size. Segments stay for the life of the pool.

    The model has no separate segments for small requests, no rounding of large ones, and no streams, so a CUDA pool
    can be larger.

    Attributes:
        nbytes: bytes of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: list[Tensor] = []
        self._free: list[_Span] = []
        self._returned: list[_Span] = []  # a storage may die while `_free` is in use

    def take(self, nbytes: int) -> UntypedStorage:
        """Allocate `nbytes`. The memory is free again when the storage dies; its contents are undefined."""
        if nbytes == 0:
            return UntypedStorage(0)
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._join()
        fitting = [span for span in self._free if span.nbytes >= size]
        if fitting:
            span = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(span)
        else:
            span = _Span(len(self._segments), 0, size)
            self._segments.append(torch.empty(size, dtype=torch.uint8))
            self.nbytes += size
        taken = span._replace(last=span.first + size)
        if taken != span:
            self._free.append(span._replace(first=taken.last))
        storage = self._storage(taken.segment, taken.first, nbytes)
        weakref.finalize(storage, self._returned.append, taken).atexit = False
        return storage

    def at(self, address: int, nbytes: int) -> UntypedStorage:
        """Memory that `take` returned, as a storage that does not keep it from being taken again.

        The storage keeps the segment alive, so that no read is of unmapped memory.
        """
        if nbytes == 0:
            return UntypedStorage(0)
        for index, segment in enumerate(self._segments):
            if 0 <= address - segment.data_ptr() < segment.nbytes:
                return self._storage(index, address - segment.data_ptr(), nbytes)
        raise AssertionError(f"{address:#x} is not in this pool")

    def _storage(self, segment: int, first: int, nbytes: int) -> UntypedStorage:
        part = self._segments[segment].numpy()[first : first + nbytes]
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    def _join(self) -> None:
        """Make returned spans free, and join them with their neighbours."""
        spans, self._free = self._free, []
        while self._returned:
            spans.append(self._returned.pop())
        for span in sorted(spans):
            before = self._free[-1] if self._free else None
            if before is not None and (before.segment, before.last) == (span.segment, span.first):
                self._free[-1] = before._replace(last=span.last)
            else:
                self._free.append(span)
