"""Rows of bytes between a device's caches and host memory, without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bateleur.runner.offload.rows import PagedRows

STAGING_BYTES = 32 << 20
"""Of each of the two buffers on a device that rows go through, unless a single row is larger."""


class Lane:
    """A second stream of a CUDA device, for what goes to the host while the first one computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def behind(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Do this on the second stream, behind all that the first was given; the event is its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """The first stream goes on behind an event of the second, or all that the second was given."""
        current = torch.cuda.current_stream(self._device)
        if event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(event)


class Copies:
    """Takes rows out of caches and brings them back, in the order of the device's work.

    What is taken is what rows hold when all that was launched before has run, whoever writes to them next, and a step
    that is launched behind the bringing of rows sees them. On CUDA rows are put together in one of two buffers and go
    to pinned memory on a stream of their own, while steps go on; only with both on their way does the device wait for
    the first, never the host. What is brought stands before the next step on its own stream.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        """`largest`: bytes of the largest row."""
        self.device = device
        self.staging_bytes = max(STAGING_BYTES, largest)
        """Of a buffer."""
        self._lane: Lane | None = None
        self._buffers: list[Tensor] = []
        self._left: list[torch.cuda.Event | None] = [None, None]
        """Of each buffer, when what it held is on the host."""
        self._turn = 0
        if device.type == "cuda":
            self._lane = Lane(device)
            self._buffers = [
                torch.empty(self.staging_bytes, dtype=torch.uint8, device=device) for _ in range(2)
            ]

    def out(self, rows: PagedRows, numbers: Sequence[int], memory: Tensor, at: Sequence[int]) -> None:
        """Copy the rows of these numbers to rows `at` of host memory (m, num_bytes) uint8."""
        for part in self._parts(rows, at):
            runs = list(_runs([at[i] for i in part]))
            buffer = rows.gather([numbers[i] for i in part], out=self._lent(len(part), rows.num_bytes))

            def send(buffer: Tensor = buffer, runs: list[tuple[int, int, int]] = runs) -> None:
                for first, start, end in runs:
                    memory[first : first + end - start].copy_(buffer[start:end], non_blocking=True)

            if self._lane is None:
                send()
            else:
                self._left[self._turn] = self._lane.behind(send)

    def back(self, memory: Tensor, at: Sequence[int], rows: PagedRows, numbers: Sequence[int]) -> None:
        """Rows `at` of host memory become those of these numbers."""
        if self._lane is not None:
            self._lane.wait()  # they may be on their way there
        for part in self._parts(rows, at):
            buffer = self._lent(len(part), rows.num_bytes)
            if buffer is None:
                buffer = torch.empty((len(part), rows.num_bytes), dtype=torch.uint8)
            for first, start, end in _runs([at[i] for i in part]):
                buffer[start:end].copy_(memory[first : first + end - start], non_blocking=True)
            rows.scatter([numbers[i] for i in part], buffer)

    def mark(self) -> torch.cuda.Event | None:
        """What to wait for, in another thread, before host memory is read or written there; None for nothing."""
        return None if self._lane is None else self._lane.behind(lambda: None)

    def _lent(self, count: int, num_bytes: int) -> Tensor | None:
        """The other buffer (count, num_bytes), as soon as what it held has left it; None without buffers."""
        if self._lane is None:
            return None
        self._turn = 1 - self._turn
        if (left := self._left[self._turn]) is not None:
            self._lane.wait(left)
        return self._buffers[self._turn][: count * num_bytes].view(count, num_bytes)

    def _parts(self, rows: PagedRows, at: Sequence[int]) -> Iterator[list[int]]:
        """Indices of `at`, as many at once as there is room for, in the order of the host's memory."""
        order, most = sorted(range(len(at)), key=at.__getitem__), self.staging_bytes // rows.num_bytes
        return (order[i : i + most] for i in range(0, len(order), most))


def _runs(spots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of ascending numbers those that follow each other: the first of them, and their indices from start to end."""
    start = 0
    for i in range(1, len(spots) + 1):
        if i == len(spots) or spots[i] != spots[i - 1] + 1:
            yield spots[start], start, i
            start = i
