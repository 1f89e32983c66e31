"""Blocks and pages as rows of bytes: all that lies under one number in all tensors of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.utils.device import upload

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Part:
    """What one tensor adds to a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the row."""

    @property
    def end(self) -> int:
        """One behind its last byte."""
        return self.start + prod(self.shape) * self.dtype.itemsize


class PagedRows:
    """Tensors (numbers, *shape) whose entries of one number belong together, as rows (numbers, num_bytes).

    A row has the bytes of one tensor after the other, in the order given.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """At least one, all on one device, each entry contiguous."""
        self.parts: tuple[Part, ...] = ()
        start = 0
        for name, tensor in tensors.items():
            self.parts += (Part(name, tensor.dtype, tuple(tensor.shape[1:]), start),)
            start = self.parts[-1].end
        self.num_bytes = start
        """Of a row."""
        # Words as wide as all of them allow: a kernel that moves single bytes takes eight times as many threads.
        fits = (each for each in _WORDS if all(_is_of(each, tensor) for tensor in tensors.values()))
        self._word = next(fits)
        self._rows = [each.view(len(each), -1).view(self._word) for each in tensors.values()]

    def gather(self, numbers: Sequence[int], out: Tensor | None = None) -> Tensor:
        """(n, num_bytes) uint8 on the device, `out` if given: copies of the rows of these numbers; nothing waits."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        into = None if out is None else out.view(self._word)
        rows = torch.cat([each.index_select(0, index) for each in self._rows], 1, out=into)
        return rows.view(torch.uint8)

    def scatter(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Rows (n, num_bytes) uint8 on the device become those of these numbers, which differ; nothing waits."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        sources = rows.view(self._word).split([each.shape[1] for each in self._rows], 1)
        for each, source in zip(self._rows, sources, strict=True):
            each.index_copy_(0, index, source)

    def put(self, numbers: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """The same out of host memory (n, num_bytes), to which nobody writes from now on."""
        self.scatter(numbers, upload(rows, self._rows[0].device))


def cut(rows: NDArray[np.uint8], parts: Sequence[Part]) -> list[NDArray[np.uint8]]:
    """Of rows (n, num_bytes) on the host, what belongs to each part (n, bytes), contiguous."""
    return [np.ascontiguousarray(rows[:, each.start : each.end]) for each in parts]


def join(pieces: Sequence[NDArray[np.uint8]], parts: Sequence[Part], rows: NDArray[np.uint8]) -> None:
    """What `cut` took apart, back into `rows` (n, num_bytes)."""
    for each, piece in zip(parts, pieces, strict=True):
        rows[:, each.start : each.end] = piece.reshape(len(rows), -1)


def _is_of(word: torch.dtype, tensor: Tensor) -> bool:
    """Whether its entries are whole words."""
    width = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return bool(width % word.itemsize == 0 and offset % word.itemsize == 0)
