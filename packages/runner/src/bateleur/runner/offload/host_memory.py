"""Host memory for offloaded rows of one kind (KV blocks or states), and the copies between it and the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.rows import PagedCache
from bateleur.runner.stats import OffloadStats
from bateleur.runner.utils.device import use_device


@dataclass(frozen=True, slots=True)
class HostSizes:
    """Numbers of KV blocks and recurrent states (pages) in host memory, and their bytes."""

    num_blocks: int
    num_pages: int
    num_bytes: int
    """Size of all rows."""

    @classmethod
    def of(cls, plan: CachePlan, num_bytes: int, num_ranks: int = 1) -> HostSizes:
        """Divide `num_bytes` of all ranks into blocks and states, in the device's ratio of cached blocks to states.

        Raises ValueError if not one of each fits.
        """
        costs = plan.costs
        own = plan.max_num_seqs * costs.pages_per_request
        shares = [
            (costs.block_bytes, plan.num_blocks),
            (costs.page_bytes, max(plan.num_state_slots - 1 - own, 1) if plan.num_state_slots else 0),
        ]
        whole = sum(size * count for size, count in shares)
        counts = [num_bytes // num_ranks * count // whole for _, count in shares]
        if any(count == 0 and each > 0 for count, (_, each) in zip(counts, shares, strict=True)):
            needed = max(-(-whole // count) for _, count in shares if count)
            of = "" if num_ranks == 1 else f", of each of {num_ranks} ranks"
            raise ValueError(
                f"kv_offload_bytes is {num_bytes}; it must be at least {needed * num_ranks}: a KV block has "
                f"{costs.block_bytes} bytes, and a state {costs.page_bytes}{of}"
            )
        taken = sum(count * size for count, (size, _) in zip(counts, shares, strict=True))
        return cls(num_blocks=counts[0], num_pages=counts[1], num_bytes=taken)


def pinned_rows(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Allocate host memory (uint8), pinned if `device` is a GPU. It is freed with the tensor.

    The memory is registered with CUDA instead of allocated by torch, whose allocator of pinned memory rounds up to a
    power of two. Raises ValueError if that fails.
    """
    rows = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), rows.data_ptr()
        if error := int(runtime.cudaHostRegister(address, rows.nbytes, 0)):
            raise ValueError(f"kv_offload_bytes: can't pin {rows.nbytes} bytes of host memory (CUDA error {error})")
        finalize(rows, _unpin, device, address).atexit = False
    return rows


def _unpin(device: torch.device, address: int) -> None:
    """Unregister memory of `pinned_rows`, in the thread that drops the last reference to it."""
    with use_device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory:
    """Rows of bytes by key, with LRU eviction. `find` and `take` keep rows from eviction until `release`."""

    def __init__(self, num_rows: int, num_bytes: int, device: torch.device) -> None:
        """num_bytes: bytes of a row. device: rows are pinned if it is a GPU."""
        self.rows: Tensor = pinned_rows((num_rows, num_bytes), device)
        self._pool = BlockPool(1 + num_rows)  # number 0 is never allocated

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that have contents."""
        return self._pool.num_cached * self.rows.shape[1]

    def __contains__(self, key: Hashable) -> bool:
        return bool(self._pool.find(key))

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the rows of these keys, which must all be in host memory, and keep them from eviction."""
        found = [self._pool.find(key) for key in keys]
        self._pool.hold(found)
        return [each - 1 for each in found]

    def take(self, keys: Sequence[Hashable]) -> list[int]:
        """Reserve a row for each key; [] if there is no room for all. `find` sees them only after `insert`."""
        if len(keys) > self._pool.num_free:
            return []
        return [each - 1 for each in self._pool.allocate(len(keys))]

    def insert(self, keys: Sequence[Hashable], rows: Sequence[int]) -> None:
        """Set the keys of rows from `take`, so that `find` returns them. A key that another row has stays there."""
        for key, row in zip(keys, rows, strict=True):
            self._pool.insert(row + 1, key)

    def release(self, rows: Iterable[int]) -> None:
        """Undo one `find` or `take` of each row, so that it can be evicted. Rows given first are evicted first."""
        self._pool.free([each + 1 for each in rows])

    def forget(self, key: Hashable) -> None:
        """Remove a key, so that `find` does not return its row any more."""
        if row := self._pool.find(key):
            self._pool.forget(row)


@dataclass(frozen=True, slots=True)
class OffloadedRows:
    """KV blocks or states: their rows on the device, their rows in host memory, and the copies between both."""

    device: PagedCache
    host: HostMemory
    copies: Copies
    stats: OffloadStats

    def save_evicted(self, evicted: Sequence[tuple[int, Hashable]]) -> None:
        """Copy rows to host memory before the device evicts them. If they do not fit, copy the last ones.

        evicted: (device row, key) of each.
        """
        new = [(number, key) for number, key in evicted if key not in self.host]
        self.save(new[-len(self.host.rows) :])

    def save(self, new: Sequence[tuple[int, Hashable]]) -> bool:
        """Copy rows that host memory lacks from the device. Returns False if there is no room.

        new: (device row, key) of each.
        """
        if not new:
            return True
        keys = [key for _, key in new]
        rows = self.host.take(keys)
        size = len(new) * self.device.rows.num_bytes
        if not rows:
            self.stats.dropped_bytes += size
            return False
        self.copies.to_host(self.device.rows, [number for number, _ in new], self.host.rows, rows)
        self.host.insert(keys, rows)
        self.host.release(rows)
        self.stats.stored_bytes += size
        return True

    def load(self, keys: Sequence[Hashable]) -> bool:
        """Copy the rows of `keys` that the device lacks to the device. Returns False if it has no room for all."""
        wanted = [key for key in keys if not self.device.pool.find(key)]
        rows = self.host.find(wanted)
        try:
            filled = self.device.pool.fill(keys)
            if filled is None:
                return False
            if filled:
                self.copies.to_device(self.host.rows, rows, self.device.rows, [number for _, number in filled])
                self.stats.loaded_bytes += len(filled) * self.device.rows.num_bytes
        finally:
            self.host.release(rows[::-1])  # evict the end of a prefix first
        return True

    def hold(self, keys: Sequence[Hashable]) -> list[int] | None:
        """Return host rows of `keys`, copied from the device if needed, and keep them from eviction.

        None if a key is neither on the device nor in host memory, or host memory has no room.
        """
        new = [(self.device.pool.find(key), key) for key in keys if key not in self.host]
        if not all(number for number, _ in new):
            return None
        here = self.host.find([key for key in keys if key in self.host])
        rows = self.host.find(keys) if self.save(new) else None
        self.host.release(here)
        return rows
