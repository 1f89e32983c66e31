"""`CpuGraphPool`: the memory that all captures of a recorded backend share."""

from __future__ import annotations

import pytest
import torch
from torch import UntypedStorage

from bateleur.cudagraph.backends.recorded import BLOCK_BYTES, CpuGraphPool


def block(pool: CpuGraphPool, count: int) -> UntypedStorage:
    """Allocate `count` blocks."""
    return pool.allocate(count * BLOCK_BYTES)


def test_memory_is_reused_only_after_its_storage_is_freed() -> None:
    pool = CpuGraphPool()
    first = block(pool, 1)
    view = torch.empty(0, dtype=torch.uint8).set_(first)
    address = first.data_ptr()
    del first
    assert block(pool, 1).data_ptr() != address, "a tensor still uses it"
    del view
    assert block(pool, 1).data_ptr() == address
    assert pool.nbytes == 2 * BLOCK_BYTES


def test_the_smallest_fitting_range_is_split_and_joined_again() -> None:
    pool = CpuGraphPool()
    large, small = block(pool, 4), block(pool, 2)
    at_large, at_small = large.data_ptr(), small.data_ptr()
    del large, small
    taken = [block(pool, 1), block(pool, 1), block(pool, 1), block(pool, 3)]
    assert [each.data_ptr() for each in taken] == [at_small, at_small + BLOCK_BYTES, at_large, at_large + BLOCK_BYTES]
    del taken[1:3]
    taken.clear()
    assert block(pool, 4).data_ptr() == at_large
    assert pool.nbytes == 6 * BLOCK_BYTES


def test_segments_are_not_joined_even_if_they_are_neighbours() -> None:
    pool = CpuGraphPool()
    taken = [block(pool, 1) for _ in range(8)]
    taken.clear()
    assert block(pool, 2).nbytes() == 2 * BLOCK_BYTES
    assert pool.nbytes == 10 * BLOCK_BYTES


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 1536])
def test_sizes_are_rounded_up_and_storages_are_as_large_as_asked(nbytes: int) -> None:
    pool = CpuGraphPool()
    storage = pool.allocate(nbytes)
    assert storage.nbytes() == nbytes
    assert pool.nbytes == -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def test_a_view_by_address_owns_nothing_and_is_readable_for_ever() -> None:
    pool = CpuGraphPool()
    storage = block(pool, 2).fill_(7)
    view = pool.storage_at(storage.data_ptr() + BLOCK_BYTES, BLOCK_BYTES)
    address = storage.data_ptr()
    del storage
    assert block(pool, 2).data_ptr() == address
    del pool
    assert set(view.tolist()) == {7}


def test_nothing_takes_nothing() -> None:
    pool = CpuGraphPool()
    assert pool.allocate(0).nbytes() == pool.storage_at(0, 0).nbytes() == pool.nbytes == 0
