"""The host-memory tier: whatever is evicted and loaded, a key leads to the contents published under it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.host_memory import OffloadedRows
from bateleur.runner.offload.rows import PagedCache, PagedRows
from bateleur.runner.offload.tier import HostTier
from bateleur.runner.stats import OffloadStats

CPU = torch.device("cpu")
KEYS = [f"key {i}".encode() for i in range(12)]


class Blocks:
    """A pool of 5 blocks over two tensors, and host memory for 4; every key has its own contents."""

    def __init__(self, num_device: int = 5, num_host: int = 4) -> None:
        shapes = {"a": (num_device + 1, 3), "b": (num_device + 1, 2, 2)}
        self.tensors = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
        self.pool, rows = BlockPool(num_device + 1), PagedRows(self.tensors)
        self.stats = OffloadStats()
        self.level = OffloadedRows(PagedCache(self.pool, rows), num_host, Copies(CPU, rows.num_bytes), self.stats)
        self.tier = HostTier(self.level, None, self.stats)
        self.held: dict[bytes, int] = {}

    def write(self, key: bytes, block: int) -> None:
        for tensor in self.tensors.values():
            tensor[block] = float(KEYS.index(key))

    def check(self, key: bytes, block: int) -> None:
        for name, tensor in self.tensors.items():
            assert (tensor[block] == KEYS.index(key)).all(), (name, key)

    def use(self, key: bytes) -> str:
        """Find, load or compute a key, as a request would, and hold its block."""
        if not self.pool.num_free:
            return "full"
        how = "found" if self.pool.find(key) else "brought" if self.tier.has_block(key) else "computed"
        if how == "brought":
            self.tier.load([key], None, 1)
        if how == "computed":
            (block,) = self.pool.allocate(1)
            self.write(key, block)
            self.pool.insert(block, key)
        else:
            block = self.pool.find(key)
            self.pool.hold([block])
        self.check(key, block)
        self.held[key] = block
        return how

    def leave(self, key: bytes) -> None:
        self.check(key, self.held[key])
        self.pool.free([self.held.pop(key)])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["use", "leave", "forget", "scratch"]), st.sampled_from(KEYS)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 6), st.integers(1, 8))
def test_a_key_leads_to_its_contents(actions: list[tuple[str, bytes]], num_device: int, num_host: int) -> None:
    blocks = Blocks(num_device, num_host)
    for action, key in actions:
        if action == "use" and key not in blocks.held:
            blocks.use(key)
        elif action == "leave" and key in blocks.held:
            blocks.leave(key)
        elif action == "forget" and key not in blocks.held and (block := blocks.pool.find(key)):
            blocks.pool.forget(block)
            blocks.tier.forget([key], [])
            assert not blocks.tier.has_block(key)
        elif action == "scratch" and blocks.pool.num_free:  # what is never published
            taken = blocks.pool.allocate(1)
            for tensor in blocks.tensors.values():
                tensor[taken] = float("nan")
            blocks.pool.free(taken)
    for key, block in blocks.held.items():
        blocks.check(key, block)


def test_what_leaves_the_device_comes_back() -> None:
    blocks = Blocks(5, 10)
    assert [blocks.use(key) for key in KEYS[:5]] == ["computed"] * 5
    for key in KEYS[:5]:
        blocks.leave(key)
    assert [blocks.use(key) for key in KEYS[5:8]] == ["computed"] * 3
    size = blocks.level.rows.shape[1]
    assert (blocks.stats.stored_bytes, blocks.stats.loaded_bytes) == (3 * size, 0)
    for key in KEYS[5:8]:
        blocks.leave(key)
    assert [blocks.use(key) for key in KEYS[:2]] == ["brought"] * 2
    assert (blocks.stats.stored_bytes, blocks.stats.loaded_bytes) == (5 * size, 2 * size)
    for key in KEYS[:2]:
        blocks.leave(key)
    for key in KEYS[8:12]:
        blocks.use(key)
    assert blocks.stats.stored_bytes == 8 * size, "what is below already isn't copied again"


def test_of_a_chain_the_beginning_stays_longest() -> None:
    """Five blocks are evicted at once, the end of the prefix first, and there is room for four."""
    blocks = Blocks()
    chain = [blocks.pool.allocate(1)[0] for _ in range(5)]
    for key, block in zip(KEYS, chain, strict=False):
        blocks.write(key, block)
        blocks.pool.insert(block, key)
    blocks.pool.free(chain[::-1])
    blocks.pool.free(blocks.pool.allocate(5))
    assert [key for key in KEYS if blocks.tier.has_block(key)] == KEYS[:4]
    blocks.tier.load(KEYS[:4], None, 8)
    for key in KEYS[:4]:
        blocks.check(key, blocks.pool.find(key))
    assert blocks.stats.host_hit_tokens == 8


def test_a_device_without_room_brings_nothing() -> None:
    blocks = Blocks()
    for key in KEYS[:5]:
        blocks.use(key)
        blocks.leave(key)
    held = blocks.pool.allocate(4)
    before = {name: tensor.clone() for name, tensor in blocks.tensors.items()}
    blocks.tier.load(KEYS[:2], None, 2)
    assert blocks.stats.host_hit_tokens == blocks.stats.loaded_bytes == 0
    for name, tensor in blocks.tensors.items():
        assert torch.equal(tensor[held], before[name][held])


def test_rows_in_use_stay() -> None:
    host = Blocks(num_host=2).level
    rows = host.take(KEYS[:2])
    assert host.take(KEYS[2:3]) == []
    host.insert(KEYS[:2], rows)
    host.release(rows[:1])
    assert host.take(KEYS[2:3]) == rows[:1]
    assert KEYS[0] not in host
    assert KEYS[1] in host


@pytest.mark.parametrize("largest", [16, 64])
def test_rows_go_in_parts_where_a_buffer_is_small(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr("bateleur.runner.offload.copies.STAGING_BYTES", 1)
    tensor, memory = torch.arange(24.0).view(6, 4), torch.zeros(8, 16, dtype=torch.uint8)
    rows, copies = PagedRows({"a": tensor}), Copies(CPU, largest)
    copies.to_host(rows, [1, 2, 3, 4, 5], memory, [7, 0, 6, 1, 3])
    kept, found = tensor.clone(), memory.view(torch.float32)
    assert torch.equal(found[[7, 0, 6, 1, 3]], tensor[1:])
    copies.to_device(memory, [6, 0, 3], rows, [4, 5, 0])
    assert torch.equal(tensor, kept[[5, 1, 2, 3, 3, 2]])


def test_copies_are_launched_before_the_memory_changes_hands() -> None:
    """The next request may write to an evicted block at once."""
    blocks = Blocks(1, 1)
    blocks.use(KEYS[0])
    blocks.leave(KEYS[0])
    seen: list[Any] = []
    told = blocks.level.save_evicted

    def note(left: Any) -> None:
        blocks.check(KEYS[0], left[0][0])
        told(left)
        seen.append(left)

    blocks.pool.on_evict = note
    blocks.pool.allocate(1)
    assert seen == [[(1, KEYS[0])]]
    assert blocks.tier.has_block(KEYS[0])


def test_as_many_evicted_rows_are_saved_as_there_is_room_for() -> None:
    """If rows that a thread used left no room for all, none was saved."""
    blocks = Blocks(4, 4)
    for key in KEYS[:4]:
        blocks.use(key)
        blocks.leave(key)
    blocks.level.take(KEYS[8:11])
    size = blocks.level.rows.shape[1]
    blocks.pool.free(blocks.pool.allocate(4))
    assert [key for key in KEYS if blocks.tier.has_block(key)] == KEYS[3:4]
    assert (blocks.stats.stored_bytes, blocks.stats.dropped_bytes) == (size, 3 * size)
    blocks.level.take(KEYS[11:])
    blocks.use(KEYS[5])
    blocks.leave(KEYS[5])
    blocks.pool.free(blocks.pool.allocate(4))
    assert not any(map(blocks.tier.has_block, KEYS))
    assert (blocks.stats.stored_bytes, blocks.stats.dropped_bytes) == (size, 4 * size)
