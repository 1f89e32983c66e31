"""Quantised weights of a checkpoint: read like plain tensors, or copied to projections as codes and scales."""

import math
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.runner.checkpoint.names import Names, StorageForm, WeightPart
from bateleur.runner.distributed.ranks import Range
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection, Rows
from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.models.sharding import Cut, WeightShard
from bateleur.runner.quantization.module import Module, QuantizedReader, check_matrix, check_parts, find_modules
from bateleur.runner.utils.tensor_files import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedEntry(TensorEntry):
    """One entry for all tensors of a quantised weight (`module`), with the plain weight's name and shape. reader: reads
    tensors of the checkpoint's format.
    """

    quantized: ClassVar[bool] = True
    module: Module
    reader: QuantizedReader

    def scheme(self) -> Scheme:
        """Return the quantisation scheme of the weight."""
        return self.reader.scheme(self.module)

    def matrix(self) -> QuantizedMatrix:
        """Return codes and scales: views of the file if its layout is that of `QuantizedMatrix`."""
        return check_matrix(self.module, self.reader.load(self.module))

    def mapped(self) -> Tensor:
        """Return a dequantised copy of the weight in float32."""
        return self.matrix().dequantize()

    def multiplied(self, factors: Tensor) -> Tensor:
        """Return a copy in float32 with row n multiplied by factors[n], with the bits of `QuantizedMatrix.scaled`."""
        return self.matrix().scaled(factors).dequantize()


def with_quantized(
    tensors: Mapping[str, TensorEntry],
    reader: QuantizedReader | None,
    spellings: Sequence[tuple[str, str]],
    names: Container[str] = (),
) -> dict[str, TensorEntry]:
    """Return the tensors, with one entry in place of all tensors (codes, scales, ...) of each quantised module.

    spellings: equivalent name prefixes (in other files, ours). names: names of plain weights; some families have fused
    experts under `X.weight`, others under `X`. Raises ValueError for an unsupported format, or for tensors that do not
    fit together.
    """
    if reader is None:
        return dict(tensors)
    modules, used = find_modules(tensors, spellings)
    found = {name: entry for name, entry in tensors.items() if name not in used}
    against: list[str] = []
    for name, module in modules.items():
        check_parts(reader, module)
        parts = [*module.parts.values()]
        found[f"{name}.weight" if f"{name}.weight" in names else name] = QuantizedEntry(
            file=parts[0].file,
            name=module.names[0],
            shape=reader.shape(module),
            dtype="F32",
            start=parts[0].start,
            num_bytes=sum(each.num_bytes for each in parts),
            named=any(each.named for each in parts),
            module=module,
            reader=reader,
        )
        if reader.excludes(module.names):
            against.append(module.names[0])
    if against:
        warnings.warn(
            f"{len(against)} modules that quantization_config excludes are quantised in the files, such as "
            f"{against[0]}; they are read as the files have them",
            stacklevel=2,
        )
    return found


Matrices = Mapping[str, Projection | GroupedProjection]
"""Projections of a model or a head, by the names of their weights."""


def quantize_projections(
    matrices: Matrices, names: Names, tensors: Mapping[str, TensorEntry], share: WeightShard
) -> Matrices:
    """Allocate codes and scales for the projections whose weights are quantised, and return these projections.

    matrices: projections by the names of their weights. share: this rank's part of the weights.
    Codes and scales have the layout of the file. Expert weights whose schemes differ stay plain, and so does a weight
    that is converted when it is loaded (transposed, for example).
    """
    parts: dict[str, list[tuple[WeightPart, TensorEntry]]] = {}
    for name, part in names.items():
        parts.setdefault(part.target, []).append((part, tensors[name]))
    chosen: dict[str, Projection | GroupedProjection] = {}
    for target, found in parts.items():
        projection = matrices.get(target)
        if projection is None or target.endswith("router_proj"):  # float32 in any dtype
            continue
        if not any(isinstance(entry, QuantizedEntry) for _, entry in found):
            continue
        if any(part.form is not StorageForm.PLAIN or part.transposed for part, _ in found):
            continue
        cut = share.cuts.get(target, {})
        if isinstance(projection, Projection):
            projection.quantize(_pieces(found, cut))
        elif (scheme := _cut(_common(found), _columns(cut, 2))) is not None:
            projection.quantize(scheme)
        else:
            continue
        chosen[target] = projection
    return chosen


def _common(found: list[tuple[WeightPart, TensorEntry]]) -> Scheme | None:
    """Return the scheme of all experts in `found`; None if they differ, or one is plain or in act order."""
    first, *others = {_scheme(part, entry) for part, entry in found}
    return None if others or first is None or first.indexed else first


def _scheme(part: WeightPart, entry: TensorEntry) -> Scheme | None:
    if not isinstance(entry, QuantizedEntry):
        return None
    scheme = entry.scheme()
    return replace(scheme, scale_dtype=torch.float32) if part.factors and scheme.layout is not Layout.F4 else scheme


def _pieces(found: list[tuple[WeightPart, TensorEntry]], cut: Cut) -> list[tuple[int, int, Scheme | None, int | None]]:
    """Return (first row, row after the last, scheme, columns of scales) for this rank's rows; adjacent rows with equal
    schemes are joined. Scheme None: plain. Columns of scales: None unless in act order.
    found: all tensors of the projection, with the part that each fills. cut: this rank's ranges by axis.
    """
    every: list[tuple[int, int, Scheme | None, int | None]] = []
    for part, entry in found:
        scheme, groups = _scheme(part, entry), None
        if isinstance(entry, QuantizedEntry) and scheme is not None and scheme.indexed:
            groups = entry.matrix().scales.shape[-1]
        for _, own in part.own_rows(cut.get(0), math.prod(entry.shape[:-1])):
            every.append((*own, _cut(scheme, _columns(cut, 1)), groups))
    joined: list[tuple[int, int, Scheme | None, int | None]] = []
    for first, end, scheme, groups in sorted(every, key=lambda each: each[0]):
        if joined and joined[-1][2] == scheme and not (scheme and scheme.indexed):
            first = joined.pop()[0]
        joined.append((first, end, scheme, groups))
    return joined


def _cut(scheme: Scheme | None, columns: Range | None) -> Scheme | None:
    return scheme if scheme is None or columns is None else scheme.cut(*columns)


def _columns(cut: Cut, axis: int) -> Range | None:
    """Return this rank's one range on `axis` of a weight, from its ranges by axis (`cut`); None for the whole axis."""
    (columns,) = cut.get(axis, (None,))
    return columns


def fill_quantized(projection: Projection | GroupedProjection, part: WeightPart, entry: TensorEntry, cut: Cut) -> None:
    """Copy this rank's ranges (`cut`, by axis) of one tensor to the codes and scales of a projection."""
    if isinstance(projection, Projection):
        matrix = entry.matrix() if isinstance(entry, QuantizedEntry) else part.read(entry.mapped())
        _fill(projection.pieces, part, matrix, cut.get(0), _columns(cut, 1))
        return
    assert projection.quantized is not None
    assert isinstance(entry, QuantizedEntry)
    matrix, target = entry.matrix(), projection.quantized
    (low, high), *_ = cut.get(0, ((0, len(target.codes)),))
    for e in range(low, high) if part.expert is None else (part.expert,):
        if low <= e < high:
            one = matrix.rows(e) if part.expert is None else matrix
            _fill((Rows(0, target.rows(e - low)),), part, one, cut.get(1), _columns(cut, 2))


def _fill(
    pieces: Sequence[Rows],
    part: WeightPart,
    matrix: QuantizedMatrix | Tensor,
    ranges: Sequence[Range] | None,
    columns: Range | None,
) -> None:
    """Copy this rank's rows and columns (None: all) of a stored matrix (N, K) to a projection, whose `pieces` are its
    row ranges. part: where and how the matrix fills the whole weight. ranges: this rank's rows of the whole weight.
    """
    if isinstance(matrix, QuantizedMatrix):
        order = part.row_order(matrix.shape[0])
        matrix = matrix if order is None else matrix.rows(order)
        matrix = matrix.scaled(part.row_factors(matrix.shape[0])) if part.factors else matrix
    for rows, own in part.own_rows(ranges, matrix.shape[0]):
        (piece,) = (each for each in pieces if each.first <= own[0] and own[1] <= each.end)
        to, target = slice(own[0] - piece.first, own[1] - piece.first), piece.matrix
        if isinstance(matrix, Tensor):
            assert isinstance(target, Projection)
            target.weight[to].copy_(matrix[slice(*rows), slice(*columns or (None,))])
        else:
            assert isinstance(target, QuantizedMatrix)
            source = matrix.rows(slice(*rows))
            target.rows(to).copy_(source if columns is None else source.cut_columns(*columns))
