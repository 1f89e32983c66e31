"""Reader for `quant_method: modelopt` (NVIDIA): FP8, NVFP4, and MIXED_PRECISION with an algorithm for each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.models.quantized import QuantizedMatrix, Scheme
from bateleur.runner.quantization.matching import each_object, strings, wildcard
from bateleur.runner.quantization.module import (
    Module,
    QuantizedReader,
    check_codes,
    check_scales,
    float_scheme,
    row_scales,
)
from bateleur.runner.quantization.nvfp4 import nvfp4_matrix, nvfp4_scheme, nvfp4_shape

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
ALGORITHMS = (*FP8, "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_BLOCK = 128, 128
_SECOND = "weight_scale_2"


class ModeloptReader(QuantizedReader):
    """Reads modelopt. A module's tensors tell its algorithm; `quantized_layers` must agree with them."""

    parts = (frozenset(("weight", "weight_scale", _SECOND)),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        layers = [str(each.get("quant_algo")).upper() for each in each_object(fields, "quantized_layers").values()]
        for algorithm in (str(fields.get("quant_algo") or "MIXED_PRECISION").upper(), *layers):
            if algorithm not in ALGORITHMS:
                raise ValueError(
                    f"quantization_config: quant_algo is {algorithm!r}; supported are {', '.join(ALGORITHMS)}"
                )
        self._ignored = strings(fields, "ignore") + strings(fields, "exclude_modules")

    def excludes(self, names: tuple[str, ...]) -> bool:
        """Return whether the configuration leaves a module with one of these names unquantised."""
        return any(wildcard(entry, names) for entry in self._ignored)

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (N, K) or (E, N, K) of the weight. Raises ValueError if sizes do not match."""
        if _SECOND in module.parts:
            return nvfp4_shape(module, "weight")
        if module["weight"].dtype != "F8_E4M3":
            raise module.refuse("weight", f"with one scale its dtype must be F8_E4M3, and U8 with {_SECOND}")
        return module["weight"].shape

    def scheme(self, module: Module) -> Scheme:
        """Return the quantisation scheme of the weight: NVFP4 or FP8."""
        if _SECOND in module.parts:
            return nvfp4_scheme(divides=False)
        return float_scheme(module, "weight_scale", _block(module))

    def load(self, module: Module) -> QuantizedMatrix:
        """Return codes and scales of the weight on the CPU, as views of the file if possible."""
        if _SECOND in module.parts:
            return nvfp4_matrix(module, "weight", _SECOND, divides=False)
        shape = self.shape(module)
        scales = row_scales(module, "weight_scale", _block(module), shape)
        codes = check_codes(module, "weight", module["weight"].mapped())
        check_scales(module, "weight_scale", scales)
        return QuantizedMatrix(self.scheme(module), shape[-1], codes, scales)


def _block(module: Module) -> tuple[int, int] | None:
    """Return the block size (128, 128) for block scales, stored as (N / 128, 1, K / 128, 1); else None."""
    return _BLOCK if len(module["weight_scale"].shape) == 4 else None
