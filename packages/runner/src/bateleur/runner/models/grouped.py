"""Grouped matrix products: rows sorted by group, with one matrix for each group.

Shapes: S rows, N columns of a product, K columns of a factor, E groups.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op
from bateleur.runner.models.matrix import Projection

_ALIGNED_BYTES = 16
_MOST_GROUPS = 1023
"""What torch's grouped product refuses, as its source has it: rows off that alignment, more groups than that."""
_GENERATIONS = (9, 10)
"""Of GPUs, that torch has a kernel for; for others (Ampere, Ada, consumer Blackwell) it copies the ends to the host."""


def masked_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply every row with every matrix and keep one product: on any device and dtype, at E times the work."""
    rows_S1 = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    y_SN = x.new_zeros(x.shape[0], weight.shape[1])
    for e in reversed(range(weight.shape[0])):  # a row belongs to the first group that ends after it
        y_SN = torch.where(rows_S1 < ends[e], F.linear(x, weight[e]), y_SN)
    return y_SN


FORMS = Implementations(masked_products, triton="bateleur.runner.models.kernels.grouped:grouped_products")
"""Used on CUDA if torch has no grouped product without a host sync; Triton's does not support float64."""


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``(x (S, K), weight (E, N, K), ends (E,) int32) -> (S, N)``: row s times the transpose of its group's matrix.

    The rows of group e end before ``ends[e]``; group 0 begins at row 0. A row does not depend on other rows, not even
    on NaN. Rows after the last group are undefined.
    """
    if x.is_cpu:
        return _by_group(x, weight, ends)
    if torch_supports(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return (FORMS.torch if x.dtype == torch.float64 else FORMS.on(x))(x, weight, ends)


def torch_supports(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product supports these tensors without reading `ends` on the host."""
    if x.dtype != torch.bfloat16 or weight.shape[0] > _MOST_GROUPS:
        return False
    if generation(x.device) not in _GENERATIONS:
        return False
    largest = math.gcd(x.stride(0), weight.stride(0), weight.stride(1))  # common divisor of all strides
    return largest * x.itemsize % _ALIGNED_BYTES == 0


@cache
def generation(device: torch.device) -> int:
    """Return the major version of a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def _by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y_SN = x.new_empty(x.shape[0], weight.shape[1])
    for e, start, end in _filled(ends):
        torch.mm(x[start:end], weight[e].t(), out=y_SN[start:end])
    return y_SN


def _filled(ends: Tensor) -> list[tuple[int, int, int]]:
    """Return (group, first row, end) of groups with rows; on a CPU, where reading `ends` does not wait."""
    every: list[int] = ends.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(zip([0, *every], every, strict=False)) if a < b]


_library = Library("bateleur", "FRAGMENT")
_grouped_product = define_op(
    _library,
    grouped_product,
    Implementations(grouped_product),
    mutates=(),
    fake=lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[1]),
)


class GroupedProjection:
    """`x W_e^T` for rows that are sorted by e, with W (E, rows, columns)."""

    __slots__ = ("_packed", "_weight", "bias")

    def __init__(self, weight: Tensor) -> None:
        self._weight: Tensor | None = weight
        self._packed: list[Projection] = []
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return (S, rows) of x (S, columns); ends (E,) int32 as in `grouped_product`."""
        if self._weight is not None:
            return _grouped_product(x, self._weight, ends)
        filled = _filled(ends)
        found = [self._packed[e](x[start:end]) for e, start, end in filled]
        if not found:
            return self._packed[0](x)
        rest = x.shape[0] - filled[-1][2]
        return torch.cat([*found, x.new_zeros(rest, found[0].shape[1])] if rest else found)

    def warm_up(self, most: int) -> None:
        """Load the kernels for up to `most` rows, which may differ between few and many rows."""
        if self._weight is not None and not self._weight.is_cpu:
            groups, _, columns = self._weight.shape
            for rows in {1, most}:
                ends = torch.full((groups,), rows, dtype=torch.int32, device=self._weight.device)
                _grouped_product(self._weight.new_zeros(rows, columns), self._weight, ends)

    @property
    def weight(self) -> Tensor:
        """W: the given tensor, or a copy once packed."""
        return (
            self._weight if self._weight is not None else torch.stack([each.weight for each in self._packed])
        )

    @property
    def is_packed(self) -> bool:
        """Whether W is stored in the packed layout only."""
        return self._weight is None

    def pack(self, *, recorded: bool = False) -> None:
        """Pack the matrix of each group if that makes products faster, see `Projection.pack`.

        recorded: graphs will be recorded, which read `ends` on the device; then nothing is packed.
        """
        if self._weight is None or recorded:
            return
        packed = [Projection(each) for each in self._weight]
        for each in packed:
            each.pack()
        if packed[0].is_packed:
            self._packed, self._weight = packed, None


def empty_grouped(groups: int, rows: int, columns: int, like: Tensor) -> GroupedProjection:
    """Return a grouped projection of uninitialised memory, with dtype and device of `like`; stored by rows."""
    return GroupedProjection(like.new_empty(groups, rows, columns))
