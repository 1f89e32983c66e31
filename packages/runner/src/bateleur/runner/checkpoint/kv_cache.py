"""FP8 KV cache in a checkpoint: whether the checkpoint asks for it, and its scales of keys and values."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bateleur.runner.checkpoint.names import Names
from bateleur.runner.models.spec import AttentionLayer, LatentLayer, ModelSpec, SingleLayer
from bateleur.runner.quantization.config import quantization_fields
from bateleur.runner.utils.tensor_files import DTYPES, TensorEntry

_SPELLINGS = (
    *("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "qkv_proj.{}_scale", "{}_proj.output_scale"),
    *("kv_scale", "attn.kv_scale"),
)
"""Names of a scale after the name of the attention layer; `{}` is k or v."""
_UNUSED = (
    *("q_scale", "attn.q_scale", "q_proj.q_scale", "qkv_proj.q_scale", "q_proj.output_scale"),
    *("prob_scale", "attn.prob_scale", "prob_output_scale", "attn.prob_output_scale"),
)
"""Scales of attention products in FP8. Queries and weights are not rounded here."""


def declared_kv_cache(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the KV cache dtype that a checkpoint asks for: "auto" if none, "fp8", or an unsupported one."""
    _, quantization = quantization_fields(folder, config)
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if scheme is None:
        return "auto"
    if not isinstance(scheme, Mapping):
        return "fp8" if str(scheme).lower() in ("fp8", "fp8_e4m3") else str(scheme)
    static = not scheme.get("dynamic", False) and scheme.get("strategy", "tensor") in ("tensor", "attn_head")
    fp8 = static and scheme.get("symmetric", True) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return "fp8" if fp8 else str(dict(scheme))


def read_kv_scales(
    spec: ModelSpec, names: Names, tensors: Mapping[str, TensorEntry]
) -> tuple[ModelSpec, frozenset[str]]:
    """Return the spec with KV cache scales in its attention layers, and the names of all tensors with such scales.

    Scales of a `LatentLayer` are ignored: they belong to the latent, while the cache holds keys and values.
    """
    stems = {
        part.target.removesuffix("o_proj"): name.rsplit(".", 2)[0]
        for name, part in names.items()
        if part.target.endswith(".o_proj")
    }
    scale_names: set[str] = set()

    def scaled(prefix: str, layer: SingleLayer) -> SingleLayer:
        if not isinstance(layer, AttentionLayer):
            return layer
        k, v = ([f"{stems[prefix]}.{each.format(letter, letter)}" for each in _SPELLINGS] for letter in "kv")
        every = {*k, *v, *(f"{stems[prefix]}.{each}" for each in _UNUSED)}
        scale_names.update(every & tensors.keys())
        if isinstance(layer, LatentLayer):
            return layer
        k_scales, v_scales = (_scales_of(spelled, tensors, layer.num_kv_heads) for spelled in (k, v))
        return replace(layer, k_scales=k_scales, v_scales=v_scales)

    return spec.with_branches(scaled), frozenset(scale_names)


def _scales_of(names: list[str], tensors: Mapping[str, TensorEntry], num_heads: int) -> tuple[float, ...]:
    """Return one scale for each head; () if the checkpoint has none. names: possible tensor names."""
    found = [tensors[name] for name in names if name in tensors]
    if not found:
        return ()
    entry = found[0]
    if len(found) > 1:
        raise ValueError(f"{entry.file}: {entry.name} and {found[1].name} are two scales of one tensor")
    if entry.dtype not in DTYPES or math.prod(entry.shape) not in (1, num_heads):
        raise ValueError(
            f"{entry.file}: {entry.name} is {entry.dtype} {entry.shape}; must be a float, or one for each of "
            f"{num_heads} heads"
        )
    scales: list[float] = entry.mapped().float().flatten().tolist()
    if wrong := [scale for scale in scales if not 0 < scale < math.inf]:
        raise ValueError(f"{entry.file}: {entry.name} is {wrong[0]}; a scale of the KV cache must be positive")
    return tuple(scales * (num_heads // len(scales)))
