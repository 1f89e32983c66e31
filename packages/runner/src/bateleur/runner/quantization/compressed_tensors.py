"""Reader for `quant_method: compressed-tensors` (llm-compressor): float, integer, packed integer and NVFP4 weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.bits import group_table, signed, unpack_rows
from bateleur.runner.quantization.floats import nvfp4_matrix, nvfp4_scheme, nvfp4_shape
from bateleur.runner.quantization.matching import each_object, integer, listed, objects, pair, strings
from bateleur.runner.quantization.module import Block, Module, QuantizedReader
from bateleur.runner.utils.arguments import refuse

FORMATS = (
    *("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_GLOBAL = "weight_global_scale"


class CompressedTensorsReader(QuantizedReader):
    """Reads compressed-tensors. A module's tensors tell its format; the configuration has the columns per scale."""

    parts = (
        frozenset(("weight", "weight_scale", "weight_zero_point")),
        frozenset(("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")),
        frozenset(("weight_packed", "weight_scale", _GLOBAL)),
    )

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, listed, "ignore")
        groups = list(each_object(fields, "config_groups").values())
        for each in (fields, *groups):
            if (form := each.get("format")) not in (None, *FORMATS):
                raise ValueError(f"quantization_config: format is {form!r}; supported are {', '.join(FORMATS)}")
        if fields.get("quantization_status") not in (None, "compressed"):
            status = fields["quantization_status"]
            raise ValueError(f"quantization_config: quantization_status is {status!r}; it must be 'compressed'")
        if fields.get("transform_config"):
            raise ValueError("quantization_config: transform_config is set; rotated weights are not supported")
        sparse = objects(fields, "sparsity_config")
        if sparse.get("format", "dense") != "dense":
            raise ValueError("quantization_config: sparsity_config is set; sparse weights are not supported")
        self._groups = [(strings(each, "targets"), objects(each, "weights")) for each in groups]
        for _, weights in self._groups:
            integer(weights, "num_bits", 8)
            integer(weights, "group_size", -1)
            pair(weights, "block_structure")
            if weights.get("strategy") not in (None, *_STRATEGIES):
                refuse("quantization_config: strategy", weights["strategy"], f"one of {', '.join(_STRATEGIES)}")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the weight: (N, K), or (E, N, K) for E experts."""
        if _GLOBAL in module:
            return nvfp4_shape(module, "weight_packed")
        if "weight_packed" not in module:
            if module["weight"].dtype not in ("F8_E4M3", "I8"):
                raise module.refuse("weight", "with a scale its dtype must be F8_E4M3 or I8")
            return module["weight"].shape
        packed, bits = module["weight_packed"], self._bits(module)
        *lead, width = packed.shape
        columns = width * 32 // bits
        if "weight_shape" in module:
            said = tuple(module["weight_shape"].mapped().flatten().tolist())
            if said[:-1] != tuple(lead):
                raise module.refuse("weight_packed", f"weight_shape is {said}")
            columns = int(said[-1])
        if packed.dtype != "I32" or -(-columns * bits // 32) != width:
            rule = f"{columns} columns of {bits} bits need I32 words in as many, and NVFP4 a {_GLOBAL}"
            raise module.refuse("weight_packed", rule)
        return (*lead, columns)

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight."""
        fp8 = "weight" in module and module["weight"].dtype == "F8_E4M3"
        zeros, weights = "weight_zero_point" in module and not fp8, self._weights(module)
        if weights.get("symmetric") is False and weights.get("type") != "float" and not zeros:
            raise ValueError(f"{module.names[0]}: has no weight_zero_point, but symmetric is false")
        if _GLOBAL in module:
            return nvfp4_scheme(divides=True)
        if "weight_packed" not in module:
            return module.float_scheme("weight_scale", self._block(module), zeros=zeros)
        layout = Layout.I4 if self._bits(module) == 4 else Layout.I8
        groups = math.prod(module["weight_scale"].shape[-1:])
        group = module.group_size(self.shape(module)[-1], groups, int(weights.get("group_size") or -1))
        indexed = _index(module, group) is not None
        return Scheme(layout, group, module.float_dtype("weight_scale"), zeros, indexed=indexed)

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight, as views of the file if possible."""
        if _GLOBAL in module:
            return nvfp4_matrix(module, "weight_packed", _GLOBAL, divides=True)
        shape, scheme = self.shape(module), self.scheme(module)
        if "weight_packed" in module:
            return self._packed(module, shape, scheme)
        block, zeros = self._block(module), None
        scales = module.row_scales("weight_scale", block, shape)
        if scheme.layout is Layout.F8:
            codes = module.e4m3("weight")
            if "weight_zero_point" in module and module["weight_zero_point"].mapped().any():
                raise module.refuse("weight_zero_point", "floating-point codes have no zero point other than 0")
        else:
            codes = module["weight"].mapped()
            zeros = module.row_scales("weight_zero_point", block, shape) if scheme.zeros else None
        return QuantizedMatrix(scheme, shape[-1], codes, scales, zeros)

    def _packed(self, module: Module, shape: tuple[int, ...], scheme: Scheme) -> QuantizedMatrix:
        bits, columns = self._bits(module), shape[-1]
        # Words are little-endian, and a nibble of I4 is that of the word.
        codes = module["weight_packed"].mapped().contiguous().view(torch.uint8)[..., : -(-columns * bits // 8)]
        zeros = None
        if scheme.zeros:
            packed = module.words("weight_zero_point")
            if packed.ndim < 2 or packed.shape[-2] != -(-shape[-2] * bits // 32):
                raise module.refuse("weight_zero_point", f"it must hold {shape[-2]} rows of {bits} bits, packed")
            zeros = unpack_rows(packed, bits, shape[-2])
        if scheme.layout is Layout.I8:
            codes, zeros = signed(codes), None if zeros is None else signed(zeros)
        scales, index = module.finite("weight_scale"), _index(module, scheme.group)
        return QuantizedMatrix(scheme, columns, codes, scales, zeros, index=index)

    def _weights(self, module: Module) -> dict[str, Any]:
        """Return `weights` of the config group that names the module: exactly, by a pattern, or by its class."""
        found: list[tuple[int, dict[str, Any]]] = []
        for targets, weights in self._groups:
            for target in targets:
                if listed(target, module.names):
                    found.append((1 if target.startswith("re:") else 0, weights))
                elif target[:1].isupper():
                    found.append((2, weights))  # the name of a class, such as Linear
        if not found:
            raise ValueError(f"{module.names[0]}: is quantised, but no group of quantization_config names it")
        return min(found, key=lambda each: each[0])[1]

    def _bits(self, module: Module) -> int:
        bits = self._weights(module).get("num_bits")
        if bits not in (4, 8):
            raise ValueError(f"{module.names[0]}: num_bits is {bits!r}; supported for packed weights are 4 and 8")
        return int(bits)

    def _block(self, module: Module) -> Block:
        weights = self._weights(module)
        size = pair(weights, "block_structure")
        return (128, 128) if size is None and weights.get("strategy") == "block" else size


def _index(module: Module, group: int) -> Tensor | None:
    if "weight_g_idx" not in module:
        return None
    index = module["weight_g_idx"].mapped()
    return None if (index < 0).any() else group_table(index, group)
