"""Reference-counted KV blocks, and the keys (prefix hashes) of those in the prefix cache."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile


class BlockPool:
    """Allocates block ids 1 .. num_blocks - 1; block 0 is the null block.
    A block in the prefix cache keeps its contents and key after its last reference is gone, until it is evicted. The
    block that was freed first is evicted first. Blocks without a key are reused last in, first out, because their
    memory may still be in a hardware cache, and so that a wrong block table shows soon.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2, because block 0 is the null block")
        self.num_blocks = num_blocks
        self.fresh: list[int] | None = None
        """If a list, `allocate` appends its blocks; the code that prepares new blocks empties it."""
        self.on_evict: Callable[[list[tuple[int, Hashable]]], None] | None = None
        """Called with blocks and keys before they are evicted, while their contents are still valid."""
        self.clear()

    def clear(self) -> None:
        """Remove all references and all keys."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._holders = [0] * self.num_blocks
        self._keys: dict[int, Hashable] = {}
        self._blocks: dict[Hashable, int] = {}
        # Not a dict, whose first entry takes longer and longer to find as leading ones are removed.
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks of the prefix cache without references, least recently freed first."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return now, including blocks in the prefix cache without references."""
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        """Maximum number of blocks that one request can hold."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Number of blocks in the prefix cache."""
        return len(self._keys)

    def allocate(self, count: int) -> list[int]:
        """Return `count` <= `num_free` blocks with one reference each, evicted from the prefix cache if needed."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        if count == 0:
            return []
        evicted: list[tuple[int, Hashable]] = []
        while len(self._free) < count:
            block, _ = self._idle.popitem(last=False)
            evicted.append((block, self._keys.pop(block)))
            del self._blocks[evicted[-1][1]]
            self._free.append(block)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._holders[block] = 1
        if self.fresh is not None:
            self.fresh += taken
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block. Of blocks in the prefix cache, the first one given is evicted first."""
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block was freed twice"
            if not self._holders[block] and block in self._keys:
                self._idle[block] = None
            elif not self._holders[block]:
                self._free.append(block)

    def insert(self, block: int, key: Hashable) -> bool:
        """Add a referenced block to the prefix cache under `key`. Its contents must not change any more.
        Returns False if another block already has the key; `block` then gets no key.
        """
        assert self._holders[block] > 0, "a block without references has no contents"
        assert block not in self._keys, "a block is inserted once"
        if key in self._blocks:
            return False
        self._keys[block] = key
        self._blocks[key] = block
        return True

    def find(self, key: Hashable) -> int:
        """Return the block with `key`, or 0 if there is none. Adds no reference, see `hold`."""
        return self._blocks.get(key, 0)

    def find_all(self, keys: Iterable[Hashable]) -> list[int]:
        """Return the blocks of the leading `keys`, up to the first missing one. Adds no references."""
        return list(takewhile(bool, map(self.find, keys)))

    def fill(self, keys: Sequence[Hashable]) -> list[tuple[int, int]] | None:
        """Allocate blocks for missing `keys` and add them to the prefix cache; the caller fills them at once.
        Returns (index of the key, block) for each, without references; None if there are not enough blocks. Of all
        keys, the last is evicted first.
        """
        there = [self.find(key) for key in keys]
        missing = [i for i, block in enumerate(there) if not block]
        self.hold(filter(None, there))
        filled = None
        if len(missing) <= self.num_free:
            blocks = self.allocate(len(missing))
            if self.fresh is not None and blocks:  # the caller overwrites them completely
                self.fresh = [block for block in self.fresh if block not in set(blocks)]
            filled = list(zip(missing, blocks, strict=True))
            for i, block in filled:
                self.insert(block, keys[i])
                there[i] = block
        self.free([block for block in reversed(there) if block])
        return filled

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks of the prefix cache."""
        for block in blocks:
            assert block in self._keys, "only cached blocks are shared"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache, if it is there."""
        if block not in self._keys:
            return
        del self._blocks[self._keys.pop(block)]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)
