"""Reads a tensor of a checkpoint into a weight, or the slices that one of several ranks needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bateleur.runner.checkpoint.names import WeightPart
from bateleur.runner.checkpoint.tensors import TensorEntry
from bateleur.runner.distributed.ranks import Range
from bateleur.runner.models.sharding import Cut


def fill_weight(weight: Tensor, part: WeightPart, entry: TensorEntry, cut: Cut) -> None:
    """Copy this rank's slice of one tensor into its `weight`.

    cut: the rank's ranges of the whole weight, by axis; {} for all of it. Only they are read from the tensor.
    """
    shift, target = 0, weight
    if part.expert is not None:
        (first, end), *_ = cut.get(0, ((0, len(weight)),))
        if not first <= part.expert < end:
            return
        shift, target = 1, weight[part.expert - first]
    stored = entry.mapped()
    stored = stored.transpose(-1, -2) if part.transposed else stored
    columns = {axis - shift: ranges for axis, ranges in cut.items() if axis > shift}
    if not columns:
        stored = stored.reshape(-1, *target.shape[1:])
    factors = part.row_factors(len(stored)) if part.factors else None
    order = part.row_order(stored.shape[part.axis])
    if order is not None and part.axis:
        columns.setdefault(part.axis, ((0, stored.shape[part.axis]),))
    for (first, end), own in own_rows(cut.get(shift), part, len(stored)):
        tensor = stored[first:end] if order is None or part.axis else stored[order[first:end]]
        for axis, ranges in columns.items():
            lines = torch.arange(stored.shape[axis]) if order is None or axis != part.axis else order
            tensor = tensor.index_select(axis, torch.cat([lines[a:b] for a, b in ranges]))
        tensor = part.form.read(tensor.to(target.dtype) if entry.quantized else tensor)
        if factors is not None:
            tensor = tensor.float() * factors[first:end].view(-1, *[1] * (tensor.ndim - 1))
        target[own[0] : own[1]].copy_(tensor)


def own_rows(ranges: Sequence[Range] | None, part: WeightPart, count: int) -> Iterator[tuple[Range, Range]]:
    """Yield pairs of row ranges to copy: from (in the part, which has `count` rows), and to (in this rank's weight).

    ranges: rows of the whole weight that the rank has; None for all.
    """
    begin, end = part.start, part.start + count
    local = 0
    for first, last in ranges or ((0, end),):
        low, high = max(first, begin), min(last, end)
        if low < high:
            yield (low - begin, high - begin), (local + low - first, local + high - first)
        local += last - first
