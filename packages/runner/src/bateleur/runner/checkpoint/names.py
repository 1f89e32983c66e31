"""Which checkpoint tensor fills which part of which weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from bateleur.runner.models.spec import AttentionLayer, Layer, MambaLayer, MlpLayer, ModelSpec


class Form(Enum):
    """How a tensor is written in a checkpoint, where it differs from the weight."""

    PLAIN = "plain"
    CONV = "conv"
    """(C, 1, W) for a weight (C, W)."""
    A_LOG = "A_log"
    """log(-A), for a weight A."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, start + rows) of weight `target`; `rows` None means all of it."""

    target: str
    start: int = 0
    rows: int | None = None
    form: Form = Form.PLAIN


Names = dict[str, Part]
"""Checkpoint tensor name to the part it fills."""
Called = tuple[str, str]
"""Names of a branch and of the norm in front of it."""
_MIXERS: Mapping[type[Layer], Called] = {
    AttentionLayer: ("self_attn", "input_layernorm"),
    MambaLayer: ("mamba", "input_layernorm"),
}


def weight_names(
    spec: ModelSpec,
    mlp: Called,
    mixers: Mapping[type[Layer], Called] = _MIXERS,
    *,
    stem: str = "model",
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
    fused_mlp: bool = False,
) -> Names:
    """Names of a decoder, which begin with `stem`. `fused_mlp`: gate and up are one tensor, as they are here."""
    names: Names = {
        f"{stem}.{embedding}.weight": Part("embedding"),
        f"{stem}.{final_norm}.weight": Part("final_norm"),
        "lm_head.weight": Part("lm_head"),
    }
    for i, layer in enumerate(spec.layers):
        branch, norm = mlp if isinstance(layer, MlpLayer) else mixers[type(layer)]
        source, target = f"{stem}.layers.{i // spec.branches_per_layer}", f"layers.{i}"
        names[f"{source}.{norm}.weight"] = Part(f"{target}.input_norm")
        for name, part in _branch_names(layer, fused_mlp).items():
            names[f"{source}.{branch}.{name}"] = replace(part, target=f"{target}.{part.target}")
    return names


def _branch_names(layer: Layer, fused_mlp: bool) -> Names:
    match layer:
        case AttentionLayer():
            q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            return {
                **_projection("qkv", {"q_proj": q, "k_proj": kv, "v_proj": kv}, layer.qkv_bias),
                **_projection("o", {"o_proj": None}, layer.o_bias),
            }
        case MlpLayer():
            rows = layer.intermediate_size
            ups = {"gate_proj": rows, "up_proj": rows} if layer.gated else {"up_proj": rows}
            return {
                **_projection("up", {"input_linear": None} if fused_mlp else ups, layer.bias),
                **_projection("down", {"output_linear" if fused_mlp else "down_proj": None}, layer.bias),
            }
        case MambaLayer():
            return {
                **_projection("in", {"in_proj": None}, layer.proj_bias),
                "conv1d.weight": Part("conv", form=Form.CONV),
                **({"conv1d.bias": Part("conv_bias")} if layer.conv_bias else {}),
                "A_log": Part("A", form=Form.A_LOG),
                "D": Part("D"),
                "dt_bias": Part("dt_bias"),
                "norm.weight": Part("norm"),
                **_projection("out", {"out_proj": None}, layer.proj_bias),
            }


def _projection(target: str, sources: Mapping[str, int | None], bias: bool) -> Names:
    """One matrix of the tensors `sources`, one below the other, each with so many rows, and their biases."""
    names, start = {}, 0
    for source, rows in sources.items():
        names[f"{source}.weight"] = Part(f"{target}_proj", start, rows)
        if bias:
            names[f"{source}.bias"] = Part(f"{target}_bias", start, rows)
        start += rows or 0
    return names
