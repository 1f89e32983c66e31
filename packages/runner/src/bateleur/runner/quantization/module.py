"""The tensors of one quantised module of a checkpoint, and the interface of the readers (one per format)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme

ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point")
"""Scales of activations, which are not quantised here."""
_MATRICES = frozenset(("weight", "weight_packed", "qweight", "blocks", "qzeros", "scales"))
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(Protocol):
    """A tensor of a safetensors file."""

    @property
    def name(self) -> str:
        """Name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""

    @property
    def dtype(self) -> str:
        """Dtype by its safetensors name: "F8_E4M3", "BF16", ..."""

    def mapped(self) -> Tensor:
        """Return the contents as a memory-mapped tensor; float8 as uint8 bits."""


@dataclass(frozen=True, slots=True)
class Module:
    """Tensors of one quantised module, by the last part of their names: `weight`, `weight_scale`, ..."""

    names: tuple[str, ...]
    """Names of the module: first the one in the file, then other spellings."""
    parts: Mapping[str, StoredTensor]

    def __getitem__(self, part: str) -> StoredTensor:
        if part not in self.parts:
            raise ValueError(f"{self.names[0]}: is quantised, but has no {part}; it has {', '.join(self.parts)}")
        return self.parts[part]

    def refuse(self, part: str, rule: str) -> ValueError:
        """Return the error for a tensor that breaks a rule."""
        entry = self[part]
        return ValueError(f"{entry.name}: is {entry.dtype} {entry.shape}; {rule}")


class QuantizedReader(ABC):
    """Reads the quantised modules of one format. fields: `quantization_config` of the checkpoint."""

    parts: ClassVar[tuple[frozenset[str], ...]]
    """Tensors that a module may have together, apart from scales of activations."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    @abstractmethod
    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (N, K) or (E, N, K) of the weight. Raises ValueError if sizes do not match."""

    @abstractmethod
    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight. Raises ValueError if it is not supported."""

    @abstractmethod
    def load(self, module: Module) -> QuantizedMatrix:
        """Return the quantised matrix on the CPU, as views of the file if possible."""

    @abstractmethod
    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""


def check_parts(reader: QuantizedReader, module: Module) -> None:
    """Raise ValueError for a tensor that the reader does not use, or a matrix without rows or columns."""
    names = module.parts.keys() - ACTIVATIONS
    used = max(reader.parts, key=lambda each: len(names & each))
    if surplus := sorted(names - used):
        beside = f" beside {', '.join(sorted(names & used))}" if names & used else ""
        raise module.refuse(surplus[0], f"quant_method {reader.fields.get('quant_method')!r} does not read it{beside}")
    for part in names & _MATRICES:
        if len(module[part].shape) < 2 or 0 in module[part].shape:
            raise module.refuse(part, "it must have rows and columns")


def check_matrix(module: Module, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix after checking it. Raises ValueError if sizes or group numbers do not match."""
    scheme, found = matrix.scheme, matrix.tensors()
    groups = matrix.scales.shape[-1] if scheme.indexed else None
    wanted = QuantizedMatrix.empty(scheme, matrix.shape, groups, torch.device("meta")).tensors()
    for name, each in wanted.items():
        if name not in found or found[name].shape != each.shape or found[name].dtype != each.dtype:
            there = f"{tuple(found[name].shape)} {found[name].dtype}" if name in found else "missing"
            rule = f"{tuple(each.shape)} {each.dtype} for a weight {matrix.shape} in {scheme}"
            raise ValueError(f"{module.names[0]}: its {name} are {there}; they must be {rule}")
    index, last = matrix.index, matrix.scales.shape[-1] - 1
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) <= last:
        raise ValueError(f"{module.names[0]}: g_idx must be in [0, {last}], the groups of scales")
    return matrix


def sides(module: Module, part: str) -> tuple[int, int]:
    """Return the shape of a matrix. Raises ValueError if it has another number of axes than two."""
    if len(shape := module[part].shape) != 2:
        raise module.refuse(part, "it must have rows and columns, and nothing else")
    return shape[0], shape[1]


def words(module: Module, part: str) -> Tensor:
    """Return a tensor of packed codes. Raises ValueError if its dtype is not int32."""
    if module[part].dtype != "I32":
        raise module.refuse(part, "packed codes must be I32")
    return module[part].mapped()


def float_scheme(module: Module, scale: str, block: tuple[int, int] | None) -> Scheme:
    """Return the scheme of FP8 or INT8 codes with scales per tensor, per row, or per `block` of (rows, columns)."""
    columns = module["weight"].shape[-1]
    layout = Layout.F8 if module["weight"].dtype.startswith("F8") else Layout.I8
    return Scheme(layout, columns if block is None else block[1], scale_dtype(module, scale))


def scale_dtype(module: Module, scale: str) -> torch.dtype:
    """Return the dtype of scales. Raises ValueError if it is no floating-point type."""
    if module[scale].dtype not in _FLOATS:
        raise module.refuse(scale, f"its dtype must be one of {', '.join(_FLOATS)}")
    return _FLOATS[module[scale].dtype]


def row_scales(module: Module, scale: str, block: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """Return scales per tensor, row or block, expanded to N rows and G column groups, (..., N, G)."""
    *lead, rows, columns = shape
    entry = module[scale]
    scales, count = entry.mapped(), math.prod(lead)
    if block is None:
        if _long(entry.shape) not in ((), _long(tuple(lead)), _long((*lead, rows))):
            raise module.refuse(scale, f"the weight {shape} needs one scale, or one for each of {rows} rows")
        each = scales.reshape(-1, rows if scales.numel() == count * rows else 1, 1)
        return each.expand(count, rows, 1).reshape(*lead, rows, 1)
    high, wide = block
    blocks = (*lead, -(-rows // high), -(-columns // wide))
    if _long(entry.shape) != _long(blocks):
        raise module.refuse(scale, f"the weight {shape} in blocks of {block} needs {blocks}")
    return scales.reshape(blocks).repeat_interleave(high, -2)[..., :rows, :]


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without axes of size 1, because files differ in them."""
    return tuple(size for size in shape if size != 1)


def check_scales(module: Module, part: str, scales: Tensor) -> Tensor:
    """Return the scales after checking them. Raises ValueError if one is NaN or infinite."""
    if not scales.isfinite().all():
        raise ValueError(f"{module[part].name}: holds NaN or infinity; the checkpoint is damaged")
    return scales


def check_codes(module: Module, part: str, codes: Tensor) -> Tensor:
    """Return the bits of e4m3 codes after checking them. Raises ValueError if one is NaN."""
    if ((codes & 0x7F) == 0x7F).any():
        raise ValueError(f"{module[part].name}: holds NaN; the checkpoint is damaged")
    return codes


def group_size(columns: int, groups: int, said: int, module: Module) -> int:
    """Return the number of columns per scale. said: `group_size` of the configuration; below 1 means all columns.

    groups: number of scales of a row. Raises ValueError if they do not fit.
    """
    group = columns if said < 1 else said
    if -(-columns // group) == groups:
        return group
    if groups and columns % groups == 0:
        return columns // groups
    raise ValueError(f"{module.names[0]}: has {groups} scales in a row of {columns} columns; group_size is {said}")
