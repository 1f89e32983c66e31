"""The free list of KV-cache blocks."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out block ids 1 .. num_blocks - 1; block 0 is the null block and never leaves.

    Freed blocks are reused last in, first out: the warmest memory first, and a stale table entry shows at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed (block 0 is the null block)")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that one request could ever hold."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)
        assert len(self._free) <= self.capacity, "a block was freed twice"
