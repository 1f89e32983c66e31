"""One kind of rows on the device, and the same kind in host memory below it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from bateleur.runner.offload.copies import Copies
from bateleur.runner.offload.device_cache import Paged
from bateleur.runner.offload.host_memory import HostMemory
from bateleur.runner.stats import OffloadStats


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of rows on the device, and below it."""

    device: Paged
    host: HostMemory
    copies: Copies
    stats: OffloadStats

    def leave(self, left: Sequence[tuple[int, Hashable]]) -> None:
        """Keep what the device is about to forget, by number and key; where room is short, the last of it."""
        new = [(number, key) for number, key in left if key not in self.host]
        self.keep(new[-len(self.host.rows) :])

    def keep(self, new: Sequence[tuple[int, Hashable]]) -> bool:
        """Copy rows of the device, none of which is here, by number and key. False if there is no room for all."""
        if not new:
            return True
        keys = [key for _, key in new]
        rows = self.host.take(keys)
        size = len(new) * self.device.rows.num_bytes
        if not rows:
            self.stats.dropped_bytes += size
            return False
        self.copies.out(self.device.rows, [number for number, _ in new], self.host.rows, rows)
        self.host.publish(keys, rows)
        self.host.release(rows)
        self.stats.stored_bytes += size
        return True

    def bring(self, keys: Sequence[Hashable]) -> bool:
        """Let requests find `keys`, each of which is on the device or here. False if the device has no room for all."""
        wanted = [key for key in keys if not self.device.pool.find(key)]
        rows = self.host.find(wanted)
        try:
            filled = self.device.pool.fill(keys)
            if filled is None:
                return False
            if filled:
                self.copies.back(self.host.rows, rows, self.device.rows, [number for _, number in filled])
                self.stats.loaded_bytes += len(filled) * self.device.rows.num_bytes
        finally:
            self.host.release(rows[::-1])  # the end of a prefix is the first to go
        return True

    def held(self, keys: Sequence[Hashable]) -> list[int] | None:
        """Rows of host memory with all of `keys`, held; what is on the device alone is copied. None if some key is in
        neither, or there is no room."""
        new = [(self.device.pool.find(key), key) for key in keys if key not in self.host]
        if not all(number for number, _ in new):
            return None
        here = self.host.find([key for key in keys if key in self.host])
        rows = self.host.find(keys) if self.keep(new) else None
        self.host.release(here)
        return rows
