"""The memory of a batch, and how a step reaches a device that has memory of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.metadata.fields import Field
from bateleur.metadata.seq_len_bound import IntArray

_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for
_PART = 4  # entries: parts begin at 16 bytes, whatever is before them, so that Triton compiles a kernel once
_GAP: IntArray = np.zeros(_PART, np.int32)


class DeviceQueue(Protocol):
    """Work of a device, done in the order of the calls, perhaps late, and before any later work of that device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy into the device tensor ``target`` of the same shape, in its dtype.

        The stager never writes to the memory of ``source`` again. If that is pinned it goes back to torch's allocator,
        which lends it out again only when the copies that were enqueued from it by ``Tensor.copy_`` have run.
        """

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue what reads and writes device memory only."""


class CurrentStream:
    """The default :class:`DeviceQueue`: the current stream of the device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As the protocol says."""
        target.copy_(source, non_blocking=True)

    def launch(self, work: Callable[[], None]) -> None:
        """As the protocol says."""
        work()


@dataclass(slots=True)
class Buffer:
    """One array of a batch.

    Attributes:
        name: ``field`` or ``field.group``.
        tensor: what the batch carries; on the device for device fields.
        host: numpy array of the same memory, empty where the device has its own.
        pad: value of the entries behind the real ones.
        dirty: leading entries that may differ from ``pad``.
    """

    name: str
    field: Field
    tensor: Tensor
    host: npt.NDArray[Any]
    pad: int | bool = 0
    dirty: int = 0

    def put(self, values: Any, count: int) -> None:
        """Write ``count`` leading entries, and the padding behind them as far as earlier values reach."""
        self.host[:count] = values
        if self.dirty > count:
            self.host[count : self.dirty] = self.pad
        self.dirty = count


def allocate(
    arrays: Sequence[tuple[str, Field, tuple[int, ...]]], device: torch.device, *, own_memory: bool
) -> list[Buffer]:
    """A buffer for each (name, field, shape), all zero, in one piece of memory of ``device``, in the order given.

    own_memory: the host does not write it.
    """
    sizes = [int(np.prod(shape)) * field.dtype.itemsize for _, field, shape in arrays]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    memory = torch.zeros(starts.pop(), dtype=torch.uint8, device=device)
    buffers = []
    for (name, field, shape), start, size in zip(arrays, starts, sizes, strict=True):
        tensor = memory[start : start + size].view(field.dtype).view(shape)
        buffers.append(Buffer(name, field, tensor, np.empty(0) if own_memory else tensor.numpy()))
    return buffers


class PackedUpload:
    """All that a step sends, as int32: put together in pinned memory, and sent by one copy."""

    def __init__(self) -> None:
        self._parts: list[IntArray] = []
        self._sizes: list[int] = []

    def add(self, values: IntArray) -> int:
        """Send ``values`` along; returns the number by which :meth:`send` gives them."""
        gap = -values.size % _PART
        self._parts += (values.reshape(-1), _GAP[:gap])
        self._sizes += (values.size, gap)
        return len(self._sizes) - 2

    def send(self, queue: DeviceQueue, device: torch.device) -> tuple[Tensor, ...]:
        """Enqueue the copy; the parts as they will be on the device, by number."""
        source = pinned((sum(self._sizes),), torch.int32, device)
        np.concatenate(self._parts, out=source.numpy(), casting="same_kind")
        target = torch.empty(source.shape, dtype=torch.int32, device=device)
        queue.copy(target, source)
        parts: tuple[Tensor, ...] = target.split(self._sizes)
        return parts


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory, not yet written: pinned where ``device`` can copy from it while the host goes on.

    To be asked for anew each time: torch's pinned allocator keeps what a copy with ``non_blocking`` still has to read.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Host to device without waiting; on a CPU it stays where it is, so nobody may write to ``array`` from now on."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return source.to(device)
    return pinned(tuple(source.shape), source.dtype, device).copy_(source).to(device, non_blocking=True)
