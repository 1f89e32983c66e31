"""Grouped products: rows are sorted by group. Shapes: S rows, K columns of the input, N of the output, E groups."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from bateleur.metadata.dispatch import Implementations, define_op
from bateleur.runner.models.matrix import Projection, allocated
from bateleur.runner.models.operators import operator
from bateleur.runner.models.quantized import QuantizedMatrix, Scheme, quantized_linear, warm_sizes

_ALIGNED_BYTES = 16
_MOST_GROUPS = 1023
"""Limits of torch's grouped product, from its source: alignment of rows in bytes, and number of groups."""
_GENERATIONS = (9, 10)
"""Major compute capabilities for which torch has a kernel. On other GPUs (Ampere, Ada, consumer Blackwell) torch's
grouped product copies `group_ends` to the host."""


Product = Callable[[int, Tensor], Tensor]
"""Returns the product of some rows and the matrix of group `int`."""


def masked_products(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Compute `grouped_product` by torch operators on any device and dtype, with the same arguments and result."""
    return _masked(x.new_zeros(x.shape[0], weight.shape[1]), x, group_ends, lambda e, rows: F.linear(rows, weight[e]))


def _masked(y: Tensor, x: Tensor, group_ends: Tensor, product: Product) -> Tensor:
    """Return a copy of y (S, N) in which row s of group e is replaced by row s of `product(e, x)`.

    Rows after the last group keep the values of y. The product of all rows is computed for every group, and a mask
    selects the rows, so that the host does not read `group_ends`. Arguments: see `grouped_product`.
    """
    rows_S1 = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    for e in reversed(range(len(group_ends))):  # a row belongs to the first group that ends after it
        y = torch.where(rows_S1 < group_ends[e], product(e, x), y)
    return y


def _by_group(y: Tensor, x: Tensor, group_ends: Tensor, product: Product) -> Tensor:
    """Write the product of each group's rows to the same rows of y (S, N), in place, and return y.

    Unlike `_masked`, it passes only the rows of the group to `product`, and needs the numbers of `group_ends` on the
    host. So it is used only on a CPU.
    """
    start = 0
    for e, end in enumerate(group_ends.tolist()):
        if start < end:
            y[start:end] = product(e, x[start:end])
        start = end
    return y


FORMS = Implementations(masked_products, triton="bateleur.runner.models.kernels.grouped:grouped_products")
"""Used on CUDA if torch has no grouped product without a host sync; Triton's does not support float64."""


def grouped_product(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Return each row of x (S, K) times the transpose of its group's matrix, for weight (E, N, K): (S, N).

    The rows of group e end before ``group_ends[e]`` (int32); group 0 begins at row 0. A row of the result depends only
    on its own input, even if others are NaN. Rows after the last group are undefined.
    """
    if x.is_cpu:
        y_SN = x.new_empty(x.shape[0], weight.shape[1])
        return _by_group(y_SN, x, group_ends, lambda e, rows: rows @ weight[e].t())
    if torch_supports(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=group_ends)
    return (FORMS.torch if x.dtype == torch.float64 else FORMS.on(x))(x, weight, group_ends)


def torch_supports(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product supports these tensors without reading `group_ends` on the host."""
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


_library = Library("bateleur", "FRAGMENT")
_grouped_product = define_op(
    _library,
    grouped_product,
    Implementations(grouped_product),
    mutates=(),
    fake=lambda x, weight, group_ends: x.new_empty(x.shape[0], weight.shape[1]),
)


@operator("quantized", lambda x, ends, parts, scheme: x.new_empty(x.shape[0], parts[0].shape[1]))
def quantized_grouped(x: Tensor, ends: Tensor, parts: Sequence[Tensor], scheme: str) -> Tensor:
    """Return `grouped_product` of x (S, K) and quantised matrices (E, N, K).

    ends: `group_ends` of `grouped_product`. parts, scheme: `QuantizedMatrix.tensors` and `Scheme.key` of the matrices.
    """
    y_SN = x.new_zeros(x.shape[0], parts[0].shape[1])
    form = _by_group if x.is_cpu else _masked
    return form(y_SN, x, ends, lambda e, rows: quantized_linear(rows, [each[e] for each in parts], scheme, None))


class GroupedProjection:
    """Grouped projection `x W_e^T`: rows x are sorted by group e, and W is (E, rows, columns)."""

    def __init__(self, weight: Tensor, device: torch.device | None = None) -> None:
        """device: device for a weight on the `meta` device; its memory is allocated there at the first read."""
        self.stored: Tensor | None = weight
        """W in its plain layout, on the `meta` device before the first read; None if it is packed or quantised."""
        self.dtype, self._device = weight.dtype, device or weight.device
        self._packed: list[Projection] = []
        self.quantized: QuantizedMatrix | None = None
        """W as codes and scales, which replace `stored`; None if W is plain or packed."""
        self.bias: Tensor | None = None

    def __call__(self, x: Tensor, group_ends: Tensor) -> Tensor:
        """Return (S, rows) for x (S, columns). group_ends: see `grouped_product`."""
        if self.stored is not None:
            return _grouped_product(x, self.weight if self.stored.is_meta else self.stored, group_ends)
        if self.quantized is not None:
            parts = list(self.quantized.tensors().values())
            return quantized_grouped(x, group_ends, parts, self.quantized.scheme.key())
        y_SN = x.new_zeros(x.shape[0], self._packed[0].num_rows)
        return _by_group(y_SN, x, group_ends, lambda e, rows: self._packed[e](rows))

    def warm_up(self, most: int) -> None:
        """Launch products of 1 to `most` rows, so that all their kernels are loaded."""
        held = self.quantized.codes if self.quantized is not None else self.stored
        if held is None or held.is_cpu or held.device != self._device:
            return
        groups, _, columns = self.quantized.shape if self.quantized is not None else held.shape
        for rows in {1, most} if self.quantized is None else warm_sizes(most, groups):
            group_ends = torch.full((groups,), rows, dtype=torch.int32, device=held.device)
            self(torch.zeros(rows, columns, dtype=self.dtype, device=held.device), group_ends)

    @property
    def weight(self) -> Tensor:
        """Weight W (groups, rows, columns): the given tensor, or a copy if it is packed or quantised."""
        if self.stored is not None:
            self.stored = allocated(self.stored, self._device)
            return self.stored
        if self.quantized is not None:
            return self.quantized.dequantize().to(self.dtype)
        return torch.stack([each.weight for each in self._packed])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (groups, rows, columns) of the weight W."""
        if self._packed:
            return len(self._packed), *self._packed[0].shape
        held = self.stored if self.quantized is None else self.quantized
        assert held is not None
        return tuple(held.shape)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the weight W under `name`, or codes and scales under names that begin with `name`."""
        if self._packed and self._packed[0].pieces:
            return {key: each for e, one in enumerate(self._packed) for key, each in one.tensors(f"{name}.{e}").items()}
        return {name: self.weight} if self.quantized is None else self.quantized.tensors(f"{name}.")

    def quantize(self, scheme: Scheme) -> None:
        """Replace the weight W by uninitialised codes and scales of a quantisation scheme."""
        self.quantized = QuantizedMatrix.empty(scheme, self.shape, None, self._device)
        self.stored = None

    def pack(self, *, recorded: bool = False) -> None:
        """Pack the matrices if that is faster on this device.

        recorded: whether graphs will be captured over the projection. Then nothing is packed, because products with
        packed matrices read `group_ends` on the host, which a captured graph cannot do.
        """
        if self._packed or recorded:
            return
        if self.quantized is not None:
            whole = self.quantized
            packed = [Projection.of(whole.rows(e), self.dtype) for e in range(whole.shape[0])]
        else:
            packed = [Projection(each) for each in self.weight]
        for each in packed:
            each.pack()
        if packed[0].in_another_layout:
            self._packed, self.stored, self.quantized = packed, None, None


def empty_grouped(groups: int, rows: int, columns: int, like: Tensor) -> GroupedProjection:
    """Return a grouped projection with the dtype and device of `like`. Its memory is allocated at the first read."""
    weight = torch.empty(groups, rows, columns, dtype=like.dtype, device="meta")
    return GroupedProjection(weight, like.device)
