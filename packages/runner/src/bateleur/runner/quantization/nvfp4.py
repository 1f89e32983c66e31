"""NVFP4 weights: e2m1 in groups of 16, with e4m3 scales and one factor for the whole tensor."""

from __future__ import annotations

import math

import torch

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.module import Module

_GROUP = 16


def nvfp4_shape(module: Module, weight: str) -> tuple[int, ...]:
    """Return the shape of the plain weight. weight: name of the tensor with the codes."""
    *lead, width = module[weight].shape
    if module[weight].dtype != "U8":
        raise module.refuse(weight, "two numbers of NVFP4 are a byte: its dtype must be U8")
    scales, expected = module["weight_scale"], (*lead, width * 2 // _GROUP)
    if scales.dtype not in ("F8_E4M3", "U8") or scales.shape != expected:
        raise module.refuse("weight_scale", f"NVFP4 needs F8_E4M3 {expected}")
    return (*lead, width * 2)


def nvfp4_scheme(divides: bool) -> Scheme:
    """Return the quantisation scheme of NVFP4. divides: whether the factor of the tensor is a divisor."""
    return Scheme(Layout.F4, _GROUP, torch.uint8, divides=divides)


def nvfp4_matrix(module: Module, weight: str, factor: str, *, divides: bool) -> QuantizedMatrix:
    """Return the quantised matrix. weight, factor: names of the tensors with codes, and with the tensor's factor.

    A factor that divides may be infinite, if all weights of its tensor are 0.
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
