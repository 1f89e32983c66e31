"""Readers of e4m3: `quant_method: fp8` (DeepSeek, Qwen), and NVIDIA's `modelopt`, which also has NVFP4."""

from collections.abc import Mapping
from typing import Any

from bateleur.runner.models.quantized import QuantizedMatrix, Scheme
from bateleur.runner.quantization.fp4 import nvfp4_matrix, nvfp4_scheme, nvfp4_shape
from bateleur.runner.quantization.matching import each_object, ends_with, pair, wildcard
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
        return ("weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"), self._block


ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_SECOND = "weight_scale_2"


class ModeloptReader(QuantizedReader):
    """Reads modelopt. A module's tensors tell its algorithm; `quantized_layers` must agree with them."""

    parts = (frozenset(("weight", "weight_scale", _SECOND)),)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields, wildcard, "ignore", "exclude_modules")
        layers = [str(each.get("quant_algo")).upper() for each in each_object(fields, "quantized_layers").values()]
        for algorithm in (str(fields.get("quant_algo") or "MIXED_PRECISION").upper(), *layers):
            if algorithm not in ALGORITHMS:
                supported = ", ".join(ALGORITHMS)
                raise ValueError(f"quantization_config: quant_algo is {algorithm!r}; supported are {supported}")

    def shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape (N, K) or (E, N, K) of the weight."""
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
    """Return the block size (128, 128) for block scales, stored as (N / 128, 1, K / 128, 1); else None."""
    return (128, 128) if len(module["weight_scale"].shape) == 4 else None
