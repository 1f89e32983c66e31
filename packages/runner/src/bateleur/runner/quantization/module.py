"""Finds the quantised modules of a checkpoint, and defines the interface of readers, one per format."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import strings
from bateleur.runner.utils.tensor_files import TensorEntry

ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point")
"""Scales of activations, which are not quantised here."""
_MATRICES = frozenset(("weight", "weight_packed", "qweight", "blocks", "qzeros", "scales"))
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Matcher = Callable[[str, tuple[str, ...]], bool]
"""Returns whether an entry of a list means a module with these names."""
Block = tuple[int, int] | None
"""Rows and columns with a common scale; None for one scale of the tensor or of each row."""


@dataclass(frozen=True, slots=True)
class Module:
    """A quantised module: its name in all spellings, and its tensors by the last part of their names.

    Checks raise ValueError with the name of a tensor.
    """

    names: tuple[str, ...]
    """Names of the module: first the one in the file, then other spellings."""
    parts: Mapping[str, TensorEntry]

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def __getitem__(self, part: str) -> TensorEntry:
        if part not in self.parts:
            raise ValueError(f"{self.names[0]}: is quantised, but has no {part}; it has {', '.join(self.parts)}")
        return self.parts[part]

    def refuse(self, part: str, rule: str) -> ValueError:
        """Return the error for the tensor `part` (the last part of its name), which breaks a rule."""
        entry = self[part]
        return ValueError(f"{entry.name}: is {entry.dtype} {entry.shape}; {rule}")

    def damaged(self, part: str, found: str = "NaN") -> ValueError:
        """Return the error for the tensor `part`, which holds `found`: text for numbers that no weight has."""
        return ValueError(f"{self[part].name}: holds {found}; the checkpoint is damaged")

    def sides(self, part: str) -> tuple[int, int]:
        """Return rows and columns of the tensor `part`. Raises ValueError unless it has two axes."""
        if len(shape := self[part].shape) != 2:
            raise self.refuse(part, "it must have rows and columns, and nothing else")
        return shape[0], shape[1]

    def words(self, part: str) -> Tensor:
        """Return the packed codes in the tensor `part`. Raises ValueError unless they are int32."""
        if self[part].dtype != "I32":
            raise self.refuse(part, "packed codes must be I32")
        return self[part].mapped()

    def e4m3(self, part: str) -> Tensor:
        """Return the bits of the e4m3 numbers in the tensor `part`. Raises ValueError if one is NaN."""
        codes = self[part].mapped()
        if ((codes & 0x7F) == 0x7F).any():
            raise self.damaged(part)
        return codes

    def finite(self, part: str) -> Tensor:
        """Return the scales or zeros in the tensor `part`. Raises ValueError if one is NaN or infinite."""
        scales = self[part].mapped()
        if not scales.isfinite().all():
            raise self.damaged(part, "NaN or infinity")
        return scales

    def float_dtype(self, part: str) -> torch.dtype:
        """Return the dtype of the scales in the tensor `part`. Raises ValueError unless it is F32, F16 or BF16."""
        if self[part].dtype not in _FLOATS:
            raise self.refuse(part, f"its dtype must be one of {', '.join(_FLOATS)}")
        return _FLOATS[self[part].dtype]

    def float_scheme(self, scale: str, block: Block, *, zeros: bool = False) -> Scheme:
        """Return the scheme of the FP8 or INT8 codes in `weight`. zeros: whether they have zero points.

        scale: name of the tensor with scales. block: rows and columns with a common scale; None: per tensor or row.
        """
        layout = Layout.F8 if self["weight"].dtype.startswith("F8") else Layout.I8
        group = self["weight"].shape[-1] if block is None else block[1]
        return Scheme(layout, group, self.float_dtype(scale), zeros)

    def row_scales(self, scale: str, block: Block, shape: tuple[int, ...]) -> Tensor:
        """Return scales per tensor, row or block, expanded to N rows and G column groups, (..., N, G).

        scale, block: see `float_scheme`. shape: shape of the weight.
        """
        *lead, rows, columns = shape
        stored, scales, count = _long(self[scale].shape), self.finite(scale), math.prod(lead)
        if block is None:
            if stored not in ((), _long(lead), _long([*lead, rows])):
                raise self.refuse(scale, f"the weight {shape} needs one scale, or one for each of {rows} rows")
            each = scales.reshape(-1, rows if scales.numel() == count * rows else 1, 1)
            return each.expand(count, rows, 1).reshape(*lead, rows, 1)
        high, wide = block
        blocks = (*lead, -(-rows // high), -(-columns // wide))
        if stored != _long(blocks):
            raise self.refuse(scale, f"the weight {shape} in blocks of {block} needs {blocks}")
        return scales.reshape(blocks).repeat_interleave(high, -2)[..., :rows, :]

    def group_size(self, columns: int, groups: int, said: int) -> int:
        """Return the number of columns with a common scale, if a row of `columns` columns has `groups` scales.

        said: `group_size` of the checkpoint; < 1 for one scale a row. If it does not agree with `groups`, the columns
        are divided equally. Raises ValueError if that is impossible.
        """
        group = columns if said < 1 else said
        if -(-columns // group) == groups:
            return group
        if groups and columns % groups == 0:
            return columns // groups
        raise ValueError(f"{self.names[0]}: has {groups} scales in a row of {columns} columns; group_size is {said}")


class QuantizedReader(ABC):
    """Reads the quantised modules of one format. fields: `quantization_config` of the checkpoint.

    parts: sets of tensors that a module may have together, apart from scales of activations.
    """

    parts: ClassVar[tuple[frozenset[str], ...]]

    def __init__(self, fields: Mapping[str, Any], matches: Matcher | None = None, *ignoring: str) -> None:
        """ignoring: names of `fields` that list unquantised modules. matches: whether a list entry means a module."""
        self.fields, self._matches = fields, matches
        self._ignored = [entry for name in ignoring for entry in strings(fields, name)]

    @abstractmethod
    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the weight: (N, K), or (E, N, K) for E experts. Raises ValueError if sizes mismatch."""

    @abstractmethod
    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight. Raises ValueError if it is not supported."""

    @abstractmethod
    def load(self, module: Module) -> QuantizedMatrix:
        """Return the quantised matrix on the CPU, as views of the file if possible."""

    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""
        return self._matches is not None and any(self._matches(entry, names) for entry in self._ignored)


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


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape without axes of size 1, because files differ in them."""
    return tuple(size for size in shape if size != 1)


_CODES = ("weight", "weight_packed", "qweight", "blocks")
_SIDES = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_g_idx", "weight_shape", "qzeros", "scales", "g_idx"),
)
_REFUSED = {
    "pre_quant_scale": "activations would have to be scaled by it",
    **dict.fromkeys(("absmax", "quant_map", "SCB"), "bitsandbytes is not supported"),
    **dict.fromkeys(("weight_bitmask", "compressed"), "sparse weights are not supported"),
}
_PLAIN = ("F64", "F32", "F16", "BF16")
_JOINED = re.compile(r"(?P<base>.+?)_(?P<part>(?:weight_)?(?:scale(?:_inv|_2)?|global_scale)|input_scale)")
"""Names of scales of a parameter that has no `.weight`: `experts.gate_up_proj_scale_inv`."""
_MXFP4 = re.compile(r"(?P<base>.+)_(?P<part>blocks|scales)")
"""Names of gpt-oss: `experts.gate_up_proj_blocks`."""


def find_modules(
    tensors: Mapping[str, TensorEntry], spellings: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, Module], set[str]]:
    """Return quantised modules by the name of their plain weight, and the names of all their tensors.

    spellings: pairs of equivalent prefixes (in other files, ours); a module gets names with both.
    """
    grouped: dict[str, dict[str, str]] = {}
    for name, entry in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in _REFUSED:
            raise ValueError(f"{entry.name}: {_REFUSED[last]}")
        part = last if last in (*_CODES, *_SIDES, *ACTIVATIONS) else None
        if part is None and (joined := _JOINED.fullmatch(name)) and joined["base"] in tensors:
            stem, part = joined["base"], joined["part"]
            part = part if part.startswith(("weight_", "input_")) else f"weight_{part}"
            grouped.setdefault(stem, {})["weight"] = stem
        if part is None and (joined := _MXFP4.fullmatch(name)) and f"{joined['base']}_blocks" in tensors:
            stem, part = joined["base"], joined["part"]
        if part is not None:
            grouped.setdefault(stem, {})[part] = name
    modules, used = {}, set[str]()
    for stem, names in grouped.items():
        parts = {part: tensors[name] for part, name in names.items()}
        codes = [parts[name] for name in _CODES if name in parts]
        if not codes or not (any(name in parts for name in _SIDES) or codes[0].dtype not in _PLAIN):
            continue
        bare = names.get("weight") == stem or len(codes[0].shape) == 3
        end = "_blocks" if "blocks" in parts else "" if bare else ".weight"
        modules[stem + end] = Module(_names(stem, codes[0].name, spellings), parts)
        used |= {*names.values()}
    return modules, used


def _names(stem: str, stored: str, spellings: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return all names of a module: in the file (`stored`), here (`stem`), and with prefixes that other tools write."""
    own = stored.rpartition(".")[0] if stored.rpartition(".")[2] in _CODES else stored.removesuffix("_blocks")
    found = [own, stem]
    for one, other in (*spellings, ("model.", "backbone."), ("model.", "model.language_model.")):
        for name in (own, stem):
            for first, second in ((one, other), (other, one)):
                if name.startswith(first):
                    found.append(second + name.removeprefix(first))
    return tuple(dict.fromkeys(found))
