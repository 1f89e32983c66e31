"""Reader for `quant_method: fp8`: e4m3 with one scale per block of 128 x 128 or per tensor (DeepSeek, Qwen)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.models.quantized import QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import ends_with, pair, strings
from bateleur.runner.quantization.module import (
    Module,
    QuantizedReader,
    check_codes,
    check_scales,
    float_scheme,
    row_scales,
)


class Fp8Reader(QuantizedReader):
    """Reads `weight` (e4m3) with `weight_scale`, or with `weight_scale_inv`, which also multiplies despite its name."""

    parts = frozenset(("weight", "weight_scale_inv")), frozenset(("weight", "weight_scale"))

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        if fields.get("fmt") not in (None, "e4m3"):
            raise ValueError(f"quantization_config: fmt is {fields['fmt']!r}; supported is 'e4m3'")
        self.block = pair(fields, "weight_block_size")
        self._ignored = strings(fields, "ignored_layers") + strings(fields, "modules_to_not_convert")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the weight. Raises ValueError if its dtype is not e4m3."""
        if module["weight"].dtype != "F8_E4M3":
            raise module.refuse("weight", "with a scale its dtype must be F8_E4M3")
        return module["weight"].shape

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight: e4m3 with one scale per block, row or tensor."""
        return float_scheme(module, _scale(module), self.block_of(module))

    def block_of(self, module: Module) -> tuple[int, int] | None:
        """Return the rows and columns with a common scale; None for one scale of the tensor or of each row."""
        return self.block if "weight_scale_inv" in module.parts or self.block else None

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight on the CPU, as views of the file if possible."""
        scale, shape = _scale(module), self.shape(module)
        scales = check_scales(module, scale, row_scales(module, scale, self.block_of(module), shape))
        codes = check_codes(module, "weight", module["weight"].mapped())
        return QuantizedMatrix(self.scheme(module), shape[-1], codes, scales)

    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""
        return any(ends_with(entry, names) for entry in self._ignored)


def _scale(module: Module) -> str:
    return "weight_scale_inv" if "weight_scale_inv" in module.parts else "weight_scale"
