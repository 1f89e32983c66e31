"""KV blocks and states as rows of bytes: a row has the entries of one block number in all tensors of a cache."""

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
    """Position of one tensor's bytes in a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte."""

    @property
    def end(self) -> int:
        """Offset after the part's last byte."""
        return self.start + prod(self.shape) * self.dtype.itemsize


class PagedRows:
    """Views tensors (numbers, *shape) as rows (numbers, num_bytes): row i has the bytes of entry i of each tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """tensors: at least one, all on one device, with contiguous entries."""
        self.parts: tuple[Part, ...] = ()
        start = 0
        for name, tensor in tensors.items():
            self.parts += (Part(name, tensor.dtype, tuple(tensor.shape[1:]), start),)
            start = self.parts[-1].end
        self.num_bytes = start
        """Size of a row."""
        # The widest possible words: a kernel that copies single bytes takes eight times as many threads.
        fits = (each for each in _WORDS if all(_divides(each, tensor) for tensor in tensors.values()))
        self._word = next(fits)
        self._rows = [each.view(len(each), -1).view(self._word) for each in tensors.values()]

    def gather(self, numbers: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return copies of the rows `numbers`, (n, num_bytes) uint8 on the device, in `out` if given. Does not wait."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        into = None if out is None else out.view(self._word)
        rows = torch.cat([each.index_select(0, index) for each in self._rows], 1, out=into)
        return rows.view(torch.uint8)

    def scatter(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Set the rows `numbers`, all different, to rows (n, num_bytes) uint8 on the device. Does not wait."""
        index = upload(np.array(numbers, np.int64), self._rows[0].device)
        sources = rows.view(self._word).split([each.shape[1] for each in self._rows], 1)
        for each, source in zip(self._rows, sources, strict=True):
            each.index_copy_(0, index, source)

    def put(self, numbers: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Set the rows `numbers` to rows (n, num_bytes) in host memory, which must not be written to any more."""
        self.scatter(numbers, upload(rows, self._rows[0].device))


def cut(rows: NDArray[np.uint8], parts: Sequence[Part]) -> list[NDArray[np.uint8]]:
    """Split rows (n, num_bytes) on the host into the bytes of each part, (n, bytes) contiguous."""
    return [np.ascontiguousarray(rows[:, each.start : each.end]) for each in parts]


def join(pieces: Sequence[NDArray[np.uint8]], parts: Sequence[Part], rows: NDArray[np.uint8]) -> None:
    """Write the pieces that `cut` returned back into `rows` (n, num_bytes)."""
    for each, piece in zip(parts, pieces, strict=True):
        rows[:, each.start : each.end] = piece.reshape(len(rows), -1)


def _divides(word: torch.dtype, tensor: Tensor) -> bool:
    """Return whether the entries of a tensor consist of whole, aligned words of this dtype."""
    width = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return bool(width % word.itemsize == 0 and offset % word.itemsize == 0)
