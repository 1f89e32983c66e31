"""Memory for what lives as long as a model, in pages of 2 MiB where the system gives them: weights, and caches.

A product with one token reads its whole matrix once. In pages of 4 KiB the processor waits for a translation every 64th
line, and reads at 20 GB/s what it else reads at 31 (one thread of an EPYC with AVX-512). Attention and recurrent layers
read blocks and states that lie anywhere, each a page of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from threading import Lock

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 * _PAGE
_LINE = 64


class HugePages:
    """Tensors out of large mappings, each of which is given back with the last tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised, on the CPU, at the begin of a cache line; not an empty one."""
        size = prod(shape) * dtype.itemsize
        taken = -(-size // _LINE) * _LINE
        if taken >= _CHUNK:
            return _mapped(taken)[:size].view(dtype).view(shape)
        with self._lock:
            if taken > self._rest.numel():
                self._rest = _mapped(_CHUNK)
            found, self._rest = self._rest[:taken], self._rest[taken:]
        return found[:size].view(dtype).view(shape)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As `torch.zeros`; on a CPU in huge pages, if it fills one. Memory is taken where it is first written to.

    Raises MemoryError if the system has no room for it.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _PAGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        return _mapped(size).view(dtype).view(tuple(shape))
    except OSError as error:
        raise MemoryError(f"there is no room for {size:,} bytes of caches: {error}") from error


def _mapped(size: int) -> Tensor:
    """Bytes from the begin of a huge page on. Who has no huge pages gets small ones: the advice is only that."""
    memory = mmap.mmap(-1, size + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    return whole[begin : begin + size]
