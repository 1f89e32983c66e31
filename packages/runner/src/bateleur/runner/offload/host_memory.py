"""Host memory for offloaded rows of one kind (KV blocks or states), and the copies between it and the device."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import finalize

import torch
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.rows import PagedCache
from bateleur.runner.stats import OffloadStats
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.device import use_device


@dataclass(frozen=True, slots=True)
class HostSizes:
    """Numbers of KV blocks and recurrent states (pages) in host memory, and the bytes of all of them."""

    num_blocks: int
    num_pages: int
    num_bytes: int

    @classmethod
    def of(cls, plan: CachePlan, num_bytes: int, num_ranks: int = 1) -> Self:
        """Return one rank's sizes, in the ratio of blocks to states in `plan`. Raises ValueError if they are too small.

        num_bytes: bytes of all `num_ranks` ranks together.
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
            sizes = f"a KV block has {costs.block_bytes} bytes, and a state {costs.page_bytes}{of}"
            refuse("kv_offload_bytes", num_bytes, f"at least {needed * num_ranks}: {sizes}")
        taken = sum(count * size for count, (size, _) in zip(counts, shares, strict=True))
        return cls(num_blocks=counts[0], num_pages=counts[1], num_bytes=taken)


def pinned_rows(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Allocate host memory (uint8), pinned if `device` is a GPU. Raises ValueError if that fails.

    It is registered with CUDA, because torch's allocator of pinned memory rounds up to a power of two.
    """
    rows = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), rows.data_ptr()
        if error := int(runtime.cudaHostRegister(address, rows.nbytes, 0)):
            raise ValueError(f"kv_offload_bytes: can't pin {rows.nbytes} bytes of host memory (CUDA error {error})")
        finalize(rows, _unpin, device, address).atexit = False
    return rows


def _unpin(device: torch.device, address: int) -> None:
    with use_device(device):  # any thread may drop the last reference to the rows
        torch.cuda.cudart().cudaHostUnregister(address)


class OffloadedRows:
    """KV blocks or states: their rows on the device, their rows in host memory by key, and the copies between both.

    Host memory evicts the least recently used rows. `find`, `take` and `hold` keep rows from eviction until `release`.
    """

    def __init__(self, device: PagedCache, num_rows: int, copies: Copies, stats: OffloadStats) -> None:
        self.device, self.copies, self.stats = device, copies, stats
        self.rows: Tensor = pinned_rows((num_rows, device.rows.num_bytes), copies.device)
        self._pool = BlockPool(1 + num_rows)  # number 0 is never allocated

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
        """Set the keys of rows from `take`, so that `find` returns them. A key that another row has stays with it."""
        for key, row in zip(keys, rows, strict=True):
            self._pool.insert(row + 1, key)

    def release(self, rows: Iterable[int]) -> None:
        """Undo one `find` or `take` of each row, so that it can be evicted. Rows given first are evicted first."""
        self._pool.free([each + 1 for each in rows])

    def forget(self, key: Hashable) -> None:
        """Remove a key, so that `find` does not return its row any more."""
        if row := self._pool.find(key):
            self._pool.forget(row)

    def save_evicted(self, evicted: Sequence[tuple[int, Hashable]]) -> None:
        """Save rows (device row, key) before eviction: the last ones, as many as there is room for."""
        new = [(number, key) for number, key in evicted if key not in self]
        num_dropped = max(len(new) - self._pool.num_free, 0)
        self.stats.dropped_bytes += num_dropped * self.device.rows.num_bytes
        self.save(new[num_dropped:])

    def save(self, new: Sequence[tuple[int, Hashable]]) -> bool:
        """Copy rows (device row, key) that host memory lacks from the device. Returns False if there is no room."""
        if not new:
            return True
        keys = [key for _, key in new]
        rows = self.take(keys)
        size = len(new) * self.device.rows.num_bytes
        if not rows:
            self.stats.dropped_bytes += size
            return False
        self.copies.to_host(self.device.rows, [number for number, _ in new], self.rows, rows)
        self.insert(keys, rows)
        self.release(rows)
        self.stats.stored_bytes += size
        return True

    def load(self, keys: Sequence[Hashable]) -> bool:
        """Copy the rows of `keys` that the device lacks to the device. Returns False if it has no room for all."""
        rows = self.find([key for key in keys if not self.device.pool.find(key)])
        try:
            filled = self.device.pool.fill(keys)
            if filled is None:
                return False
            if filled:
                self.copies.to_device(self.rows, rows, self.device.rows, [number for _, number in filled])
                self.stats.loaded_bytes += len(filled) * self.device.rows.num_bytes
        finally:
            self.release(rows[::-1])  # evict the end of a prefix first
        return True

    def hold(self, keys: Sequence[Hashable]) -> list[int] | None:
        """Return host rows of `keys`, copied from the device if needed, and keep them from eviction.

        Returns None if a key is neither on the device nor in host memory, or if host memory has no room.
        """
        new = [(self.device.pool.find(key), key) for key in keys if key not in self]
        if not all(number for number, _ in new):
            return None
        here = self.find([key for key in keys if key in self])
        rows = self.find(keys) if self.save(new) else None
        self.release(here)
        return rows
