"""Reads the slices of a checkpoint's tensors that one of several ranks needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.checkpoint.names import Part
from bateleur.runner.checkpoint.tensors import DTYPES, TensorEntry
from bateleur.runner.distributed.ranks import Range
from bateleur.runner.models.sharding import Cut

_BYTES: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def fill_shard(weight: Tensor, part: Part, entry: TensorEntry, cut: Cut) -> None:
    """Copy this rank's slice of one tensor into its `weight`. `cut` is the rank's part of the whole weight."""
    shift, target = 0, weight
    if part.expert is not None:
        (first, end), *_ = cut.get(0, ((0, len(weight)),))
        if not first <= part.expert < end:
            return
        shift, target = 1, weight[part.expert - first]
    unit = _BYTES[DTYPES[entry.dtype].itemsize]
    stored: NDArray[np.unsignedinteger] = np.memmap(entry.file, unit, "r", entry.start, entry.shape)
    stored = stored.swapaxes(-1, -2) if part.transposed else stored
    columns = {axis - shift: ranges for axis, ranges in cut.items() if axis > shift}
    if not columns:
        stored = stored.reshape(-1, *target.shape[1:])
    factors = part.row_factors(len(stored)) if part.factors else None
    order = part.row_order(stored.shape[part.axis])
    if order is not None and part.axis:
        columns.setdefault(part.axis, ((0, stored.shape[part.axis]),))
    for (first, end), own in _own_rows(cut.get(shift), part, len(stored)):
        lines = stored[first:end] if order is None or part.axis else stored[order[first:end].numpy()]
        for axis, ranges in columns.items():
            lines_of = order if axis == part.axis else None
            lines = np.concatenate([_slice(lines, axis, each, lines_of) for each in ranges], axis)
        tensor = torch.from_numpy(np.array(lines)).view(DTYPES[entry.dtype])
        tensor = part.form.read(tensor)
        if factors is not None:
            tensor = tensor.float() * factors[first:end].view(-1, *[1] * (tensor.ndim - 1))
        target[own[0] : own[1]].copy_(tensor)


def _own_rows(ranges: Sequence[Range] | None, part: Part, count: int) -> Iterator[tuple[Range, Range]]:
    """Yield this rank's rows within the part's `count` rows, and their rows in the rank's weight."""
    begin, end = part.start, part.start + count
    local = 0
    for first, last in ranges or ((0, end),):
        low, high = max(first, begin), min(last, end)
        if low < high:
            yield (low - begin, high - begin), (local + low - first, local + high - first)
        local += last - first


def _slice(
    lines: NDArray[np.unsignedinteger], axis: int, own: Range, order: Tensor | None
) -> NDArray[np.unsignedinteger]:
    taken = slice(*own) if order is None else order[slice(*own)].numpy()
    return lines[(slice(None),) * axis + (taken,)]
