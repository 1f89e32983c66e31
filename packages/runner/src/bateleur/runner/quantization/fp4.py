"""4-bit floating-point codes (e2m1): NVFP4 modules of several formats, and the reader of MXFP4 (experts of gpt-oss)."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import starts_with
from bateleur.runner.quantization.module import Module, QuantizedReader

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


def nvfp4_shape(module: Module, weight: str) -> tuple[int, ...]:
    """Return the shape of the plain weight. weight: name of the tensor with the codes."""
    *lead, width = module[weight].shape
    if module[weight].dtype != "U8":
        raise module.refuse(weight, "two numbers of NVFP4 are a byte: its dtype must be U8")
    scales, expected = module["weight_scale"], (*lead, width * 2 // _NVFP4_GROUP)
    if scales.dtype not in ("F8_E4M3", "U8") or scales.shape != expected:
        raise module.refuse("weight_scale", f"NVFP4 needs F8_E4M3 {expected}")
    return (*lead, width * 2)


def nvfp4_scheme(divides: bool) -> Scheme:
    """Return the quantisation scheme of NVFP4. divides: whether the factor of the tensor is a divisor."""
    return Scheme(Layout.F4, _NVFP4_GROUP, torch.uint8, divides=divides)


def nvfp4_matrix(module: Module, weight: str, factor: str, *, divides: bool) -> QuantizedMatrix:
    """Return the quantised matrix. factor: its dividing factors may be infinite, if all weights of a tensor are 0."""
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


class Mxfp4Reader(QuantizedReader):
    """Reads `blocks` (E, N, K / 32, 16) with two codes a byte, low nibble first, and `scales` (E, N, K / 32) e8m0."""

    parts = (frozenset(("blocks", "scales")),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, starts_with, "modules_to_not_convert")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (E, N, K) of the weight."""
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
