"""Reader for `quant_method: fp8`: e4m3 with one scale per block of 128 x 128 or per tensor (DeepSeek, Qwen)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.models.quantized import QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import ends_with, pair
from bateleur.runner.quantization.module import Block, Module, QuantizedReader


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
        """Return the name of the scales, and the rows and columns of a block."""
        return ("weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"), self._block
