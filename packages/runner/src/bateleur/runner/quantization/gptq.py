"""Readers of integer codes in `qweight`: GPTQ (GPTQModel, AutoGPTQ, optimum), auto-round, and AWQ of version gemm."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.bits import AWQ, group_table, pack_nibbles, signed, unpack_columns
from bateleur.runner.quantization.matching import contains, each_object, integer, occurs, starts_with, strings
from bateleur.runner.quantization.module import Module, QuantizedReader
from bateleur.runner.utils.arguments import refuse

_FORMATS = ("gptq", "gptq_v2")
_UNUSED_ZEROS = "quantization_config: sym is true, but qzeros in the files hold zero points; they are not used"


class GptqReader(QuantizedReader):
    """Reads `qweight` (K * bits / 32, N), `qzeros` (G, N * bits / 32) and `scales` (G, N) of a weight (N, K).

    G is the number of column groups with a common scale. less_one: whether `qzeros` are one less than the zero
    points (version 1 of the format).
    """

    parts = (frozenset(("qweight", "qzeros", "scales", "g_idx")),)
    less_one: bool

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
        if form not in _FORMATS:
            raise ValueError(f"quantization_config: checkpoint_format is {form!r}; supported are {', '.join(_FORMATS)}")
        if fields.get("pack_dtype") not in (None, "int32"):
            raise ValueError(f"quantization_config: pack_dtype is {fields['pack_dtype']!r}; supported is 'int32'")
        self.less_one = form == "gptq"
        self._inside = strings(fields, "modules_in_block_to_quantize")
        dynamic = each_object(fields, "dynamic")
        self._dynamic = [
            (each[:2] == "-:", each.removeprefix("-:").removeprefix("+:"), dynamic[each]) for each in dynamic
        ]
        for each in (fields, *dynamic.values()):
            integer(each, "bits", 4)
            integer(each, "group_size", -1)
            _check_sym(each)

    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""
        for without, pattern, _ in self._dynamic:
            if starts_with(pattern, names):
                return without
        return bool(self._inside) and not any(name.endswith(self._inside) for name in names)

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (N, K) of the weight."""
        height, rows = module.sides("qweight")
        return rows, height * 32 // self._bits(module)

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight."""
        columns, groups = self.shape(module)[1], module["scales"].shape[0]
        group = module.group_size(columns, groups, self._said(module, "group_size") or -1)
        layout = Layout.I4 if self._bits(module) == 4 else Layout.I8
        # With `sym`, all zero points are 2^(bits - 1), and `qzeros` hold this number, or one less.
        zeros, indexed = self._said(module, "sym") is False, self._index(module, group) is not None
        return Scheme(layout, group, module.float_dtype("scales"), zeros, indexed=indexed)

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes, scales and zeros of the weight."""
        bits, scheme, (rows, columns) = self._bits(module), self.scheme(module), self.shape(module)
        codes = unpack_columns(module["qweight"].mapped().T, bits)
        stored = unpack_columns(module.words("qzeros"), bits)[:, :rows]
        # Version 1 stores zero points (G, N) less one, modulo 2^bits.
        found = ((stored + int(self.less_one)) & ((1 << bits) - 1)).T.contiguous()
        zeros = found if scheme.zeros else None
        if zeros is None:
            written = found - int(self.less_one)
            if ((written != (1 << bits - 1)) & (written != (1 << bits - 1) - 1)).any():
                warnings.warn(_UNUSED_ZEROS, stacklevel=2)
        if bits == 8:
            codes, zeros = signed(codes), None if zeros is None else signed(zeros)
        else:
            codes = pack_nibbles(codes)
        scales = module.finite("scales").T.contiguous()
        return QuantizedMatrix(scheme, columns, codes, scales, zeros, index=self._index(module, scheme.group))

    def _said(self, module: Module, name: str) -> Any:
        """Return a field of the first `dynamic` entry that matches the module, or else of the configuration."""
        own = next((own for _, pattern, own in self._dynamic if starts_with(pattern, module.names)), {})
        return own.get(name, self.fields.get(name))

    def _bits(self, module: Module) -> int:
        """Return the bits per code of a module, computed from the widths of `qzeros` and `scales`."""
        rows = math.prod(module["scales"].shape[1:])
        bits = 32 * module["qzeros"].shape[1] // rows if rows else 0
        if module["qweight"].dtype != "I32" or bits not in (4, 8):
            raise module.refuse("qweight", f"it has {bits} bits a weight in I32; supported are 4 and 8")
        if module["qweight"].shape[1] != rows:
            raise module.refuse("qweight", f"scales have {rows} columns")
        return bits

    def _index(self, module: Module, group: int) -> Tensor | None:
        """Return the scale group of each column, (K,) int32 (act order); None if each `group` columns are a group."""
        if "g_idx" in module:
            index, columns = module["g_idx"].mapped(), self.shape(module)[1]
            if index.shape != (columns,):
                raise module.refuse("g_idx", f"it must hold the group of each of {columns} columns")
            return group_table(index, group)
        if self._said(module, "desc_act"):
            raise ValueError(f"{module.names[0]}: has no g_idx, which desc_act of quantization_config needs")
        return None


def _check_sym(fields: Mapping[str, Any]) -> None:
    if fields.get("sym") not in (None, True, False):
        refuse("quantization_config: sym", fields["sym"], "true or false")


_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters that only patterns have in `extra_config`; other keys are names, and no prefixes of longer ones."""
_LESS_ONE, _AS_THEY_ARE = "auto_round:auto_gptq", ("auto_round", "auto_round:gptqmodel")


class AutoRoundReader(GptqReader):
    """Reads auto-round. `packing_format` says how zeros are stored: one less with auto_gptq (default), else as is."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({**fields, "checkpoint_format": "gptq_v2"})
        packing = fields.get("packing_format") or _LESS_ONE
        if packing not in (_LESS_ONE, *_AS_THEY_ARE):
            raise ValueError(f"quantization_config: packing_format is {packing!r}; its zero points are not known")
        self.less_one = packing == _LESS_ONE
        self._extra = each_object(fields, "extra_config")
        self._patterns = [name for name in self._extra if _SPECIAL.intersection(name)]
        for each in self._extra.values():
            integer(each, "bits", 4)
            integer(each, "group_size", -1)
            _check_sym(each)

    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""
        return integer(self._own(names), "bits", 0) >= 16

    def _said(self, module: Module, name: str) -> Any:
        """Return a field of the module's entry in `extra_config`, or else of the configuration."""
        return self._own(module.names).get(name, self.fields.get(name))

    def _own(self, names: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the entry of `extra_config` that is one of the names, or else the first pattern that occurs in one."""
        if (exact := next((name for name in names if name in self._extra), None)) is not None:
            return self._extra[exact]
        return next((self._extra[pattern] for pattern in self._patterns if occurs(pattern, names)), {})


class AwqReader(QuantizedReader):
    """Reads `qweight` (K, N / 8), `qzeros` (G, N / 8) and `scales` (G, N) of a weight (N, K) with G column groups.

    The first two are packed along N.
    """

    parts = (frozenset(("qweight", "qzeros", "scales")),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, contains, "modules_to_not_convert")
        version = str(fields.get("version") or "gemm").lower()
        if version != "gemm":
            raise ValueError(f"quantization_config: version is {version!r}; supported is 'gemm'")
        bits = fields.get("bits", fields.get("w_bit", 4))
        if bits != 4:
            raise ValueError(f"quantization_config: bits is {bits!r}; supported for AWQ is 4")
        self._group = integer(fields, "group_size", integer(fields, "q_group_size", 128))

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (N, K) of the weight."""
        columns, width = module.sides("qweight")
        rows = module["scales"].shape[-1]
        if module["qweight"].dtype != "I32" or width * 8 != rows:
            raise module.refuse("qweight", f"{rows} rows of 4 bits need I32 words, 8 rows each")
        return rows, columns

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight."""
        group = module.group_size(self.shape(module)[1], module["scales"].shape[0], self._group)
        return Scheme(Layout.I4, group, module.float_dtype("scales"), zeros=True)

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes, scales and zeros of the weight."""
        codes = pack_nibbles(unpack_columns(module["qweight"].mapped(), 4, AWQ).T)
        zeros = unpack_columns(module.words("qzeros"), 4, AWQ).T.contiguous()
        scales = module.finite("scales").T.contiguous()
        return QuantizedMatrix(self.scheme(module), self.shape(module)[1], codes, scales, zeros)
