"""Cache blocks: who holds them, what they contain, and which may be reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence


class BlockPool:
    """Hands out block ids 1 .. num_blocks - 1; block 0 is the null block and never leaves.

    A block that was published under a key keeps its contents after its last holder is gone, for whoever asks for the
    key, until memory is needed: the least recently freed one goes first. Other blocks are reused last in, first out:
    the warmest memory first, and a stale table entry shows at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed (block 0 is the null block)")
        self.num_blocks = num_blocks
        self.fresh: list[int] | None = None
        """If a list, `allocate` appends what it hands out; whoever prepares blocks for their holders empties it."""
        self.on_evict: Callable[[list[tuple[int, Hashable]]], None] | None = None
        """Is told of blocks and keys whose contents are about to be forgotten, before anybody may write to them."""
        self.clear()

    def clear(self) -> None:
        """Nobody holds a block, and nothing is known of their contents."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._holders = [0] * self.num_blocks
        self._keys: dict[int, Hashable] = {}
        self._blocks: dict[Hashable, int] = {}
        # Not a dict: that takes ever longer to find its first entry, as the first are removed.
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks without holders, least recently freed first."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, idle published ones included."""
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        """Blocks that one request could ever hold."""
        return self.num_blocks - 1

    @property
    def num_published(self) -> int:
        """Blocks that a key leads to."""
        return len(self._keys)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`. What idle ones among them contained is forgotten."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        if count == 0:
            return []
        left: list[tuple[int, Hashable]] = []
        while len(self._free) < count:
            block, _ = self._idle.popitem(last=False)
            left.append((block, self._keys.pop(block)))
            del self._blocks[left[-1][1]]
            self._free.append(block)
        if left and self.on_evict is not None:
            self.on_evict(left)
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._holders[block] = 1
        if self.fresh is not None:
            self.fresh += taken
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block; of published ones, the first given is the first to be forgotten."""
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block was freed twice"
            if self._holders[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, key: Hashable) -> bool:
        """Say what a held block contains, which must not change from now on.

        False if another block has that key already: the first one stays, and this one remains private.
        """
        assert self._holders[block] > 0, "a block without a holder has no contents"
        assert block not in self._keys, "a block is published once"
        if key in self._blocks:
            return False
        self._keys[block] = key
        self._blocks[key] = block
        return True

    def publish_all(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        """As `publish`, of several blocks, each under its key."""
        holders, names, known = self._holders, self._keys, self._blocks
        for block, key in zip(blocks, keys, strict=True):
            assert holders[block] > 0, "a block without a holder has no contents"
            assert block not in names, "a block is published once"
            if key not in known:
                names[block] = key
                known[key] = block

    def find(self, key: Hashable) -> int:
        """The block that contains `key`, 0 if none does. Not yet held: see `hold`."""
        return self._blocks.get(key, 0)

    def find_all(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks that contain the first of `keys`, up to one that none contains. Not yet held."""
        found, known = [], self._blocks
        for key in keys:
            if key not in known:
                break
            found.append(known[key])
        return found

    def fill(self, keys: Sequence[Hashable]) -> list[tuple[int, int]] | None:
        """Blocks for those of `keys` that nothing contains: (index, block) each, for the caller to fill before anybody
        runs. They are published and held by nobody; of all keys the last is the first to be forgotten. None if there
        are not enough blocks.
        """
        there = [self._blocks.get(key, 0) for key in keys]
        missing = [i for i, block in enumerate(there) if not block]
        self.hold(filter(None, there))
        filled = None
        if len(missing) <= self.num_free:
            blocks = self.allocate(len(missing))
            if self.fresh is not None and blocks:  # nothing will be left of what they contained
                self.fresh = [block for block in self.fresh if block not in set(blocks)]
            filled = list(zip(missing, blocks, strict=True))
            for i, block in filled:
                self.publish(block, keys[i])
                there[i] = block
        self.free([block for block in reversed(there) if block])
        return filled

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one hold more on published blocks."""
        for block in blocks:
            assert block in self._keys, "only published blocks are shared"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def forget(self, block: int) -> None:
        """Drop the key of a block, if it has one: nobody new will find it."""
        if block not in self._keys:
            return
        del self._blocks[self._keys.pop(block)]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)
