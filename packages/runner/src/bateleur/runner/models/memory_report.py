"""Computes the memory of packed weights, for a model that need not be loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.metadata.native import unavailable_reason
from bateleur.runner.models import native
from bateleur.runner.models.decoder import HybridDecoder
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.native.quantized import PackedMatrix
from bateleur.runner.models.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Shape, dtype and bytes of one weight, which may be several tensors (codes and scales)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of a plain weight, or of the tokens that a quantised one is multiplied with."""
    num_bytes: int

    @property
    def numel(self) -> int:
        """Number of values, whatever their storage."""
        return math.prod(self.shape)


def weight_sizes(
    weights: Mapping[str, Tensor], matrices: Mapping[str, Projection | GroupedProjection]
) -> dict[str, WeightSize]:
    """Return the sizes of all weights of a model, by name. matrices: the projections among them."""
    name_of = {part: name for name, each in matrices.items() for part in each.tensors(name)}
    found: dict[str, WeightSize] = {}
    for part, tensor in weights.items():
        name = name_of.get(part, part)
        whole = matrices.get(name, tensor)
        before = found[name].num_bytes if name in found else 0
        found[name] = WeightSize(tuple(whole.shape), whole.dtype, before + tensor.nbytes)
    return found


def quantized_parts(projection: Projection | GroupedProjection) -> list[QuantizedMatrix]:
    """Return the quantised matrices of a projection; [] if it is plain."""
    if isinstance(projection, GroupedProjection):
        return [] if projection.quantized is None else [projection.quantized]
    return [each.matrix for each in projection.pieces if isinstance(each.matrix, QuantizedMatrix)]


def _first(matrix: QuantizedMatrix) -> QuantizedMatrix:
    return matrix.rows(0) if matrix.codes.ndim == 3 else matrix


def describe_quantized(matrix: QuantizedMatrix, device: torch.device, dtype: torch.dtype) -> str:
    """Return a description of the kernel that multiplies by a quantised matrix, for reports. dtype: dtype of tokens."""
    if device.type == "cuda" and dtype != torch.float64:
        return "Triton, dequantised in registers"
    packed = PackedMatrix.of(_first(matrix), dtype)
    return "torch, dequantised in tiles" if packed is None else "C, dequantised in registers"


def packed_change(matrix: QuantizedMatrix, dtype: torch.dtype) -> int:
    """Return the additional bytes of a quantised matrix after packing for a CPU. dtype: dtype of the tokens."""
    one, many = _first(matrix), len(matrix.codes) if matrix.codes.ndim == 3 else 1
    if (packed := PackedMatrix.of(one, dtype)) is None:
        return 0
    after, before = (sum(part.nbytes for part in each.tensors().values()) for each in (packed, one))
    return many * (after - before)


def packed_weight_bytes(
    model: HybridDecoder, device: torch.device, stored: torch.dtype, *, recorded: bool = False
) -> int:
    """Return the bytes of all weights of `model` after `HybridDecoder.pack` for `device`.

    stored: dtype of the checkpoint. C kernels store a matrix in bfloat16 if that represents its numbers. A packed
    output projection that is tied to the embedding is a second copy. recorded: whether CUDA graphs are captured.
    """
    held = sum(weight.nbytes for weight in model.weights().values())
    if device.type != "cpu" or unavailable_reason() is not None:
        return held
    for projection in model.projections:
        grouped = isinstance(projection, GroupedProjection)
        if grouped and recorded:
            continue
        if quantised := quantized_parts(projection):
            held += sum(packed_change(each, model.dtype) for each in quantised)
            continue
        weight = projection.weight
        packed = native.packed_bytes(weight.shape[-2], weight.shape[-1], weight.dtype, stored)
        if packed is not None:
            held += packed * (len(weight) if grouped else 1) - (0 if weight is model.embedding else weight.nbytes)
    return held
