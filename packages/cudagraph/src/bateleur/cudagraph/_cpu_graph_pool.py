"""`CpuGraphPool`: CPU memory that all captures of one `RecordedBackend` share, like the private pool of CUDA graphs."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

BLOCK_BYTES = 512
"""Allocations are rounded up to a multiple of this, as in torch's CUDA allocator."""


class _Range(NamedTuple):
    """Bytes first .. last - 1 of one segment."""

    segment: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first


class CpuGraphPool:
    """CPU memory that returns to the pool when the allocated storage dies, a model of the pool of CUDA graphs.

    An allocation takes the smallest free range that fits, and leaves the rest of the range free. Neighbouring free
    ranges are joined. If no range fits, a new segment is allocated. Segments are never freed. A CUDA pool may be
    larger, because it has separate segments for small allocations and rounds large ones further.

    Attributes:
        nbytes: bytes of all segments.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: list[Tensor] = []
        self._free: list[_Range] = []
        self._returned: list[_Range] = []  # separate, because a storage may die while `_free` is being changed

    def allocate(self, nbytes: int) -> UntypedStorage:
        """Return `nbytes` bytes with undefined contents. They are free again when the storage dies."""
        if nbytes == 0:
            return UntypedStorage(0)
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._free_returned()
        fitting = (each for each in self._free if each.nbytes >= size)
        found = min(fitting, key=lambda each: each.nbytes, default=None)
        if found is None:
            found = _Range(len(self._segments), 0, size)
            self._segments.append(torch.empty(size, dtype=torch.uint8))
            self.nbytes += size
        else:
            self._free.remove(found)
        taken = found._replace(last=found.first + size)
        if taken != found:
            self._free.append(found._replace(first=taken.last))
        storage = self._storage(taken.segment, taken.first, nbytes)
        weakref.finalize(storage, self._returned.append, taken).atexit = False
        return storage

    def storage_at(self, address: int, nbytes: int) -> UntypedStorage:
        """Return memory that `allocate` returned, as a storage that does not reserve it but keeps it readable."""
        if nbytes == 0:
            return UntypedStorage(0)
        for index, segment in enumerate(self._segments):
            if 0 <= address - segment.data_ptr() < segment.nbytes:
                return self._storage(index, address - segment.data_ptr(), nbytes)
        raise AssertionError(f"{address:#x} is not in this pool")

    def _storage(self, segment: int, first: int, nbytes: int) -> UntypedStorage:
        part = self._segments[segment].numpy()[first : first + nbytes]
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    def _free_returned(self) -> None:
        ranges, self._free = self._free, []
        while self._returned:
            ranges.append(self._returned.pop())
        for each in sorted(ranges):
            before = self._free[-1] if self._free else None
            if before is not None and (before.segment, before.last) == (each.segment, each.first):
                self._free[-1] = before._replace(last=each.last)
            else:
                self._free.append(each)
