"""The least that a `StateBlockPool` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Pool:
    """Pages 1 to `num_pages` - 1: the last one freed is handed out first, and published ones last, oldest first."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages - 1
        self.clear()

    def clear(self) -> None:
        """Nobody holds a page, and nothing is published."""
        self._free = list(range(self.capacity, 0, -1))
        self._holds = [0] * (1 + self.capacity)
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take pages that nobody holds; AssertionError if there are not so many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while len(self._free) < count:
            self.forget(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holds[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Take one hold more on published pages."""
        for page in pages:
            self._idle.pop(page, None)
            self._holds[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each."""
        for page in pages:
            self._holds[page] -= 1
            assert self._holds[page] >= 0, f"page {page} was freed twice"
            if not self._holds[page]:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Whether `key` leads to this page from now on; it stays with a page that has it already."""
        if key in self._pages:
            return False
        self._keys[page], self._pages[key] = key, page
        return True

    def find(self, key: bytes) -> int:
        """The page that `key` leads to, 0 if none."""
        return self._pages.get(key, 0)

    def forget(self, page: int) -> None:
        """Drop the key of a page."""
        del self._pages[self._keys.pop(page)]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
