"""Reader for `quant_method: mxfp4`: experts of gpt-oss, e2m1 in groups of 32 with scales that are powers of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import starts_with
from bateleur.runner.quantization.module import Module, QuantizedReader

_GROUP = 32
_NAN = 255


class Mxfp4Reader(QuantizedReader):
    """Reads `blocks` (E, N, K / 32, 16) with two codes a byte, low nibble first, and `scales` (E, N, K / 32) e8m0."""

    parts = (frozenset(("blocks", "scales")),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, starts_with, "modules_to_not_convert")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (E, N, K) of the weight."""
        *lead, groups, width = module["blocks"].shape
        if module["blocks"].dtype != "U8" or len(lead) != 2 or width != _GROUP // 2:
            raise module.refuse("blocks", f"MXFP4 needs U8 (experts, rows, groups, {_GROUP // 2})")
        if module["scales"].dtype != "U8" or module["scales"].shape != (*lead, groups):
            raise module.refuse("scales", f"MXFP4 needs U8 {(*lead, groups)}")
        return (*lead, groups * _GROUP)

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight."""
        return Scheme(Layout.MX4, _GROUP, torch.uint8)

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight, as views of the file."""
        shape, scales = self.shape(module), module["scales"].mapped()
        if (scales == _NAN).any():
            raise module.damaged("scales")
        return QuantizedMatrix(self.scheme(module), shape[-1], module["blocks"].mapped().flatten(-2), scales)
