"""A minimal `StateBlockPool`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Pool:
    """Slots 1 to `num_pages` - 1. The last freed slot is allocated first, and published ones last, oldest first."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages - 1
        self.clear()

    def clear(self) -> None:
        """Remove all references and keys."""
        self._free = list(range(self.capacity, 0, -1))
        self._holds = [0] * (1 + self.capacity)
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Number of slots without a reference."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Allocate free slots; AssertionError if there are too few."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while len(self._free) < count:
            self.forget(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holds[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add one reference to published slots."""
        for page in pages:
            self._idle.pop(page, None)
            self._holds[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove one reference from each slot."""
        for page in pages:
            self._holds[page] -= 1
            assert self._holds[page] >= 0, f"page {page} was freed twice"
            if not self._holds[page]:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def insert(self, page: int, key: bytes) -> bool:
        """Set the key of a slot; return False if another slot has the key."""
        if key in self._pages:
            return False
        self._keys[page], self._pages[key] = key, page
        return True

    def find(self, key: bytes) -> int:
        """Return the slot with `key`, 0 if there is none."""
        return self._pages.get(key, 0)

    def forget(self, page: int) -> None:
        """Remove the key of a slot."""
        del self._pages[self._keys.pop(page)]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
