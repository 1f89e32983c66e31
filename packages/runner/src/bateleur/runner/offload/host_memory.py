"""Host memory for rows of one kind: the device's free list again, over memory of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from bateleur.runner.cache.block_pool import BlockPool
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.utils.device import current


@dataclass(frozen=True, slots=True)
class HostSizes:
    """How many rows of each kind host memory is for."""

    num_blocks: int
    num_pages: int
    num_bytes: int
    """Of all of them."""

    @classmethod
    def of(cls, plan: CachePlan, num_bytes: int, num_ranks: int = 1) -> HostSizes:
        """Of `num_bytes`, of which each rank has its part, blocks and pages have what they have of the device's memory
        that requests share.

        Raises ValueError where not one of each fits.
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


def lasting(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Host memory for as long as the tensor lives: pinned where `device` can copy from it while the host goes on.

    torch's own allocator of pinned memory takes the next power of two, which is up to twice as much, so what it would
    pin is registered as it is. Raises ValueError where that fails.
    """
    rows = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), rows.data_ptr()
        if error := int(runtime.cudaHostRegister(address, rows.nbytes, 0)):
            raise ValueError(f"kv_offload_bytes: {rows.nbytes} bytes can't be pinned, CUDA says {error}")
        finalize(rows, _unpin, device, address).atexit = False
    return rows


def _unpin(device: torch.device, address: int) -> None:
    """Give up what `lasting` pinned, in whatever thread drops the last reference to it."""
    with current(device):
        torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory:
    """Rows by key; where room is needed, the least recently used goes first. Rows that somebody holds stay."""

    def __init__(self, num_rows: int, num_bytes: int, device: torch.device) -> None:
        """Pinned where `device` can copy from it while the host goes on."""
        self.rows: Tensor = lasting((num_rows, num_bytes), device)
        self._pool = BlockPool(1 + num_rows)  # whose number 0 nobody gets

    @property
    def used_bytes(self) -> int:
        """Of rows with contents."""
        return self._pool.num_published * self.rows.shape[1]

    def __contains__(self, key: Hashable) -> bool:
        return bool(self._pool.find(key))

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The rows of these keys, all of which are here, held."""
        found = [self._pool.find(key) for key in keys]
        self._pool.hold(found)
        return [each - 1 for each in found]

    def take(self, keys: Sequence[Hashable]) -> list[int]:
        """Rows for keys that are not here, held, and not found before `publish`; [] if there is no room for all."""
        if len(keys) > self._pool.num_free:
            return []
        return [each - 1 for each in self._pool.allocate(len(keys))]

    def publish(self, keys: Sequence[Hashable], rows: Sequence[int]) -> None:
        """Held rows contain these keys from now on; one that is here already stays where it is."""
        for key, row in zip(keys, rows, strict=True):
            self._pool.publish(row + 1, key)

    def release(self, rows: Iterable[int]) -> None:
        """Give up one hold on each; the first of them is the first to go."""
        self._pool.free([each + 1 for each in rows])

    def forget(self, key: Hashable) -> None:
        """Nobody will find it."""
        if row := self._pool.find(key):
            self._pool.forget(row)
