"""Copies rows of bytes between a device's caches and host memory. The host never waits."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bateleur.runner.offload.rows import PagedRows

STAGING_BYTES = 32 << 20  # size of each of the two staging buffers on a device, unless a single row is larger


class CopyStream:
    """A second CUDA stream for copies to the host, which overlap with computation on the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._device = torch.cuda.Stream(device), device

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Queue `work` on the second CUDA stream, after all work on the current one. Returns an event at its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """Let the current CUDA stream wait for an event of the second one, or for everything queued there."""
        current = torch.cuda.current_stream(self._device)
        if event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(event)


class Copies:
    """Copies rows from caches to host memory and back, in the order of the device's work.

    On CUDA, rows are gathered into one of two staging buffers and go to pinned memory on a second CUDA stream, while
    steps run. If both buffers are in use, the device waits for the first one; the host never waits.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        """largest: bytes of the largest row."""
        self.device = device
        self.staging_bytes = max(STAGING_BYTES, largest)  # size of a buffer
        self._stream = CopyStream(device) if device.type == "cuda" else None
        size = self.staging_bytes if device.type == "cuda" else 0
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]  # per buffer: event after which it is on the host
        self._current = 0

    def to_host(self, rows: PagedRows, numbers: Sequence[int], memory: Tensor, host_rows: Sequence[int]) -> None:
        """Copy rows `numbers` of the cache `rows` to rows `host_rows` of `memory` (m, num_bytes) uint8."""
        for part in self._parts(rows, host_rows):
            buffer = rows.gather([numbers[i] for i in part], out=self._next_buffer(len(part), rows.num_bytes))
            send = partial(_copy_runs, memory, buffer, [host_rows[i] for i in part], to_host=True)
            if self._stream is None:
                send()
            else:
                self._sent[self._current] = self._stream.run(send)

    def to_device(self, memory: Tensor, host_rows: Sequence[int], rows: PagedRows, numbers: Sequence[int]) -> None:
        """Copy rows `host_rows` of host memory `memory` to rows `numbers` of the cache `rows`."""
        if self._stream is not None:
            self._stream.wait()  # copies of these rows to the host may not be done
        for part in self._parts(rows, host_rows):
            buffer = self._next_buffer(len(part), rows.num_bytes)
            _copy_runs(memory, buffer, [host_rows[i] for i in part], to_host=False)
            rows.scatter([numbers[i] for i in part], buffer)

    def record(self) -> torch.cuda.Event | None:
        """Return the event after which another thread may access host memory; None on a CPU."""
        return None if self._stream is None else self._stream.run(lambda: None)

    def _next_buffer(self, count: int, num_bytes: int) -> Tensor:
        """Return the next staging buffer (count, num_bytes); a new one on a CPU. The device waits until it is free."""
        if self._stream is None:
            return torch.empty((count, num_bytes), dtype=torch.uint8)
        self._current = 1 - self._current
        if (sent := self._sent[self._current]) is not None:
            self._stream.wait(sent)
        return self._buffers[self._current][: count * num_bytes].view(count, num_bytes)

    def _parts(self, rows: PagedRows, host_rows: Sequence[int]) -> Iterator[list[int]]:
        """Yield indices into `host_rows`, sorted by host row, in groups that fit into a staging buffer."""
        order, most = sorted(range(len(host_rows)), key=host_rows.__getitem__), self.staging_bytes // rows.num_bytes
        return (order[i : i + most] for i in range(0, len(order), most))


def _copy_runs(memory: Tensor, buffer: Tensor, host_rows: Sequence[int], *, to_host: bool) -> None:
    """Copy row i of `buffer` to (from) row `host_rows[i]` of `memory`: one copy per run of consecutive rows."""
    start = 0
    for i in range(1, len(host_rows) + 1):
        if i == len(host_rows) or host_rows[i] != host_rows[i - 1] + 1:
            on_host, staged = memory[host_rows[start] : host_rows[i - 1] + 1], buffer[start:i]
            (on_host if to_host else staged).copy_(staged if to_host else on_host, non_blocking=True)
            start = i
