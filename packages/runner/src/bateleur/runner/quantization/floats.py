"""Readers of floating-point codes: `quant_method: fp8` (DeepSeek, Qwen), NVIDIA's `modelopt`, and MXFP4 of gpt-oss.

Codes are e4m3, or 4-bit e2m1 in NVFP4 and MXFP4. Several formats have NVFP4 modules.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import each_object, ends_with, pair, starts_with, wildcard
from bateleur.runner.quantization.module import Block, Module, QuantizedReader

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


def nvfp4_shape(module: Module, weight: str) -> tuple[int, ...]:
    """Return the shape of an NVFP4 weight, after checking its scales. weight: name of the tensor with the codes."""
    *lead, width = module[weight].shape
    if module[weight].dtype != "U8":
        raise module.refuse(weight, "two numbers of NVFP4 are a byte: its dtype must be U8")
    scales, expected = module["weight_scale"], (*lead, width * 2 // _NVFP4_GROUP)
    if scales.dtype not in ("F8_E4M3", "U8") or scales.shape != expected:
        raise module.refuse("weight_scale", f"NVFP4 needs F8_E4M3 {expected}")
    return (*lead, width * 2)


def nvfp4_scheme(divides: bool) -> Scheme:
    """Return the quantisation scheme of NVFP4.

    divides: whether the FP8 scales are divided by the tensor's global scale (compressed-tensors), not multiplied by it.
    """
    return Scheme(Layout.F4, _NVFP4_GROUP, torch.uint8, divides=divides)


def nvfp4_matrix(module: Module, weight: str, factor: str, *, divides: bool) -> QuantizedMatrix:
    """Return the quantised matrix. weight, factor: names of the tensors with codes and with global scales.

    divides: see `nvfp4_scheme`. A global scale that divides may be infinite: then all weights of its matrix are 0.
    """
    *lead, rows, columns = nvfp4_shape(module, weight)
    module.float_dtype(factor)
    factors, count = module[factor].mapped().float(), math.prod(lead)
    if divides and (factors <= 0).any():
        raise module.refuse(factor, "it is divided by, so it must be positive")
    if factors.isnan().any() or (not divides and factors.isinf().any()):
        raise module.damaged(factor, "NaN or infinity")
    if not factors.numel() or factors.numel() % count or rows % (factors.numel() // count):
        raise module.refuse(factor, f"{count} matrices need as many, or as many for equal parts of their rows")
    parts = factors.reshape(count, -1).repeat_interleave(rows * count // factors.numel(), 1)
    codes, scales = module[weight].mapped(), module.e4m3("weight_scale")
    return QuantizedMatrix(nvfp4_scheme(divides), columns, codes, scales, factors=parts.reshape(*lead, rows))


class Fp8Reader(QuantizedReader):
    """Reads `weight` (e4m3) with `weight_scale`, or with `weight_scale_inv`, which also multiplies despite its name."""

    parts = frozenset(("weight", "weight_scale_inv")), frozenset(("weight", "weight_scale"))

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, ends_with, "ignored_layers", "modules_to_not_convert")
        if fields.get("fmt") not in (None, "e4m3"):
            raise ValueError(f"quantization_config: fmt is {fields['fmt']!r}; supported is 'e4m3'")
        self._block = pair(fields, "weight_block_size")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the weight, which must be e4m3."""
        if module["weight"].dtype != "F8_E4M3":
            raise module.refuse("weight", "with a scale its dtype must be F8_E4M3")
        return module["weight"].shape

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight: e4m3 with one scale per block, row or tensor."""
        return module.float_scheme(*self._scales(module))

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight."""
        shape = self.shape(module)
        scales = module.row_scales(*self._scales(module), shape)
        return QuantizedMatrix(self.scheme(module), shape[-1], module.e4m3("weight"), scales)

    def _scales(self, module: Module) -> tuple[str, Block]:
        return ("weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"), self._block


ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_SECOND = "weight_scale_2"


class ModeloptReader(QuantizedReader):
    """Reads modelopt. A module's tensors tell its algorithm. `quantized_layers` must name supported algorithms."""

    parts = (frozenset(("weight", "weight_scale", _SECOND)),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, wildcard, "ignore", "exclude_modules")
        layers = [str(each.get("quant_algo")).upper() for each in each_object(fields, "quantized_layers").values()]
        for algorithm in (str(fields.get("quant_algo") or "MIXED_PRECISION").upper(), *layers):
            if algorithm not in ALGORITHMS:
                supported = ", ".join(ALGORITHMS)
                raise ValueError(f"quantization_config: quant_algo is {algorithm!r}; supported are {supported}")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the weight: (N, K), or (E, N, K) for E experts."""
        if _SECOND in module:
            return nvfp4_shape(module, "weight")
        if module["weight"].dtype != "F8_E4M3":
            raise module.refuse("weight", f"with one scale its dtype must be F8_E4M3, and U8 with {_SECOND}")
        return module["weight"].shape

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight: NVFP4 or FP8."""
        if _SECOND in module:
            return nvfp4_scheme(divides=False)
        return module.float_scheme("weight_scale", _block(module))

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight."""
        if _SECOND in module:
            return nvfp4_matrix(module, "weight", _SECOND, divides=False)
        shape = self.shape(module)
        scales = module.row_scales("weight_scale", _block(module), shape)
        return QuantizedMatrix(self.scheme(module), shape[-1], module.e4m3("weight"), scales)


def _block(module: Module) -> Block:
    """Return block size (128, 128) if scales of a weight (N, K) are stored as (N / 128, 1, K / 128, 1); else None."""
    return (128, 128) if len(module["weight_scale"].shape) == 4 else None


class Mxfp4Reader(QuantizedReader):
    """Reads weights (E, N, K) of E experts: `blocks` (E, N, K / 32, 16) and `scales` (E, N, K / 32) e8m0.

    A byte of `blocks` has two codes, low nibble first.
    """

    parts = (frozenset(("blocks", "scales")),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, starts_with, "modules_to_not_convert")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (E, N, K) of the weight of E experts."""
        *lead, groups, width = module["blocks"].shape
        if module["blocks"].dtype != "U8" or len(lead) != 2 or width != _MXFP4_GROUP // 2:
            raise module.refuse("blocks", f"MXFP4 needs U8 (experts, rows, groups, {_MXFP4_GROUP // 2})")
        if module["scales"].dtype != "U8" or module["scales"].shape != (*lead, groups):
            raise module.refuse("scales", f"MXFP4 needs U8 {(*lead, groups)}")
        return (*lead, groups * _MXFP4_GROUP)

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight."""
        return Scheme(Layout.MX4, _MXFP4_GROUP, torch.uint8)

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight, as views of the file."""
        shape, scales = self.shape(module), module["scales"].mapped()
        if (scales == 255).any():
            raise module.damaged("scales")
        return QuantizedMatrix(self.scheme(module), shape[-1], module["blocks"].mapped().flatten(-2), scales)
