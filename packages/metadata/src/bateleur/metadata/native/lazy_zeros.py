"""Zero-initialised CPU tensors whose memory the operating system allocates at the first write."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_MIN_BYTES = 2 << 20  # smaller tensors come from torch's allocator


def lazy_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros like ``torch.zeros``, but write nothing to the memory of large CPU tensors.

    A KV cache would else occupy its full size before the first request. Large CPU tensors are mapped and start at a
    page boundary. The system is asked for huge pages, because attention reads blocks at scattered addresses. Raises
    MemoryError with the size in bytes.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _MIN_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there is no room for {size:,} bytes of caches: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
