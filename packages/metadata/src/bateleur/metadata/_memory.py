"""The memory of a batch: every device field in one block at fixed offsets, and how its bytes reach the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.metadata.fields import Field

Transfer: TypeAlias = Callable[[Tensor, Tensor], None]
"""``(dst, src)``: enqueue a copy of ``src`` into the device tensor ``dst`` of the same shape, in its dtype.

The stager never writes to the memory of ``src`` again, so the copy may run late; but copies run in the order of the
calls, and before any later work of the device that reads ``dst``.
"""

_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for
_MERGED_GAP = 32 << 10  # bytes copied for nothing cost less than the call of a second copy up to about here


def enqueue(dst: Tensor, src: Tensor) -> None:
    """Copy in the current stream of the device; the default :data:`Transfer`."""
    dst.copy_(src, non_blocking=True)


@dataclass(slots=True)
class Buffer:
    """One array of a batch.

    Attributes:
        name: ``field`` or ``field.group``.
        tensor: what the batch carries; on the device for device fields.
        host: numpy array that staging writes: of the same memory, or of the mirror where the device has its own.
        pad: value of the entries behind the real ones.
        dirty: leading entries that may differ from ``pad``.
        touched: leading entries of ``host`` that the step may have changed.
    """

    name: str
    field: Field
    tensor: Tensor
    host: npt.NDArray[Any]
    pad: int | bool = 0
    dirty: int = 0
    touched: int = 0

    def put(self, values: Any, count: int) -> None:
        """Write ``count`` leading entries, and the padding behind them as far as earlier values reach."""
        self.host[:count] = values
        dirty = self.dirty
        if dirty > count:
            self.host[count:dirty] = self.pad
            self.touched = dirty
        else:
            self.touched = count
        self.dirty = count


class Block:
    """One piece of device memory for many arrays, in the order given, and its mirror on the host.

    On a device without memory of its own the mirror is the memory, and nothing is ever copied.
    """

    def __init__(self, device: torch.device, transfer: Transfer | None) -> None:
        self.device = device
        self.mirrored = transfer is not None or device.type != "cpu"
        self.transfer = enqueue if transfer is None else transfer
        self._pieces: list[tuple[Buffer, int, int]] = []  # each with its first byte and the bytes of an entry

    def allocate(self, arrays: Sequence[tuple[str, Field, tuple[int, ...]]]) -> list[Buffer]:
        """A buffer for each (name, field, shape), all zero; to be called once."""
        sizes = [int(np.prod(shape)) * field.dtype.itemsize for _, field, shape in arrays]
        starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        self._host = self._tensor = torch.zeros(starts.pop(), dtype=torch.uint8)
        if self.mirrored:
            self._tensor = torch.zeros_like(self._host, device=self.device)
        self._mirror: npt.NDArray[np.uint8] = self._host.numpy()
        buffers = []
        for (name, field, shape), start, size in zip(arrays, starts, sizes, strict=True):
            tensor, host = (
                memory[start : start + size].view(field.dtype).view(shape)
                for memory in (self._tensor, self._host)
            )
            buffers.append(Buffer(name, field, tensor, host.numpy()))
            self._pieces.append((buffers[-1], start, host.stride(0) * field.dtype.itemsize))
        return buffers

    def upload(self) -> None:
        """Send what the step touched, in few pieces: neighbours travel with the gap between them if it is short."""
        if not self.mirrored:
            return
        first = last = 0
        for buffer, start, entry_bytes in self._pieces:
            if not buffer.touched:
                continue
            if start - last > _MERGED_GAP or last == first:
                self._send(first, last)
                first = start
            last = start + buffer.touched * entry_bytes
        self._send(first, last)

    def _send(self, first: int, last: int) -> None:
        if last > first:
            self.transfer(self._tensor[first:last], torch.from_numpy(self._snapshot(first, last)))

    def _snapshot(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """The bytes of the mirror now, in memory that no later step writes to: copies may run when they like."""
        return self._mirror[first:last].copy()
