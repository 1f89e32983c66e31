"""Reader for `quant_method: awq`, version gemm (AutoAWQ)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme
from bateleur.runner.quantization.bits import AWQ, pack_nibbles, unpack_columns
from bateleur.runner.quantization.matching import contains, integer
from bateleur.runner.quantization.module import Module, QuantizedReader


class AwqReader(QuantizedReader):
    """Reads `qweight` (K, N / 8) and `qzeros` (G, N / 8), packed along N, and `scales` (G, N) for G column groups."""

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
