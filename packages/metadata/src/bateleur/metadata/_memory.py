"""Pinned memory, and copies between host and device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.metadata.seq_len_bound import IntArray

_PART = 4  # int32 entries; 16-byte alignment keeps Triton at one specialisation per kernel


class DeviceQueue(Protocol):
    """Queue of work on a device. It runs calls in order, maybe later, but before device work queued after them."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy into the device tensor ``target``, converted to its dtype. The caller does not write to
        ``source`` again. torch's allocator reuses pinned memory only after copies by ``Tensor.copy_`` have run.
        """

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue work that reads and writes device memory only."""


class CurrentStream:
    """Default :class:`DeviceQueue`: the current stream of the device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def launch(self, work: Callable[[], None]) -> None:
        work()


def movable(x: Tensor) -> Tensor:
    """Return ``x``, or a uint8 view of a float8 tensor, which torch cannot copy, gather or zero by index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


class PackedUpload:
    """All int32 arrays that a step sends to the device, packed in pinned memory and sent by one copy."""

    def __init__(self) -> None:
        self._arrays: list[IntArray] = []

    def add(self, values: IntArray) -> int:
        """Append ``values``. Returns their index in the result of :meth:`send`."""
        self._arrays.append(values.reshape(-1))
        return len(self._arrays) - 1

    def send(self, queue: DeviceQueue, device: torch.device) -> list[Tensor]:
        """Enqueue one copy of all arrays to ``device``. Returns their device tensors, by the index from :meth:`add`."""
        sizes = [array.size for array in self._arrays]
        spaces = [-(-size // _PART) * _PART for size in sizes]
        source = pinned((sum(spaces),), torch.int32, device)
        for array, part in zip(self._arrays, source.split(spaces), strict=True):
            part.numpy()[: array.size] = array
        target = torch.empty(source.shape, dtype=torch.int32, device=device)
        queue.copy(target, source)
        return [part[:size] for part, size in zip(target.split(spaces), sizes, strict=True)]


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised host memory, pinned if ``device`` is a CUDA device.

    Allocate new memory for each copy: torch's pinned allocator keeps memory that a ``non_blocking`` copy still reads.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to ``device`` without waiting. On a CPU the result shares memory: do not write to ``array``
    afterwards.
    """
    source = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return source.to(device)
    return pinned(tuple(source.shape), source.dtype, device).copy_(source).to(device, non_blocking=True)


class Fetch:
    """Asynchronous copies of tensors, all on one device, to the host. On a CPU nothing is copied.

    `wait` waits for work queued before the `Fetch` was made; work queued later continues meanwhile. The tensors must
    not change before `wait` returns.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        if not tensors or not tensors[0].is_cuda:
            self._on_host = list(tensors)
            return
        self._on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for host, each in zip(self._on_host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[npt.NDArray[Any]]:
        """Return the contents of the tensors, in the order of the constructor's argument."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._on_host]
