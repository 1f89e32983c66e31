"""Which checkpoint tensor fills which part of which weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer, ModelSpec


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


def attention_names(source: str, target: str, layer: AttentionLayer) -> Names:
    """Query, key and value become one weight, in this order."""
    sizes = {"q_proj": layer.num_heads, "k_proj": layer.num_kv_heads, "v_proj": layer.num_kv_heads}
    names: Names = {f"{source}.o_proj.weight": Part(f"{target}.o_proj")}
    if layer.o_bias:
        names[f"{source}.o_proj.bias"] = Part(f"{target}.o_bias")
    start = 0
    for name, heads in sizes.items():
        rows = heads * layer.head_dim
        names[f"{source}.{name}.weight"] = Part(f"{target}.qkv_proj", start, rows)
        if layer.qkv_bias:
            names[f"{source}.{name}.bias"] = Part(f"{target}.qkv_bias", start, rows)
        start += rows
    return names


def mlp_names(source: str, target: str, layer: MlpLayer) -> Names:
    """`up_proj` and `down_proj`, and for a gated layer `gate_proj` in front of `up_proj`."""
    ups = ("gate_proj", "up_proj") if layer.gated else ("up_proj",)
    names: Names = {f"{source}.down_proj.weight": Part(f"{target}.down_proj")}
    if layer.bias:
        names[f"{source}.down_proj.bias"] = Part(f"{target}.down_bias")
    for i, name in enumerate(ups):
        start, rows = i * layer.intermediate_size, layer.intermediate_size
        names[f"{source}.{name}.weight"] = Part(f"{target}.up_proj", start, rows)
        if layer.bias:
            names[f"{source}.{name}.bias"] = Part(f"{target}.up_bias", start, rows)
    return names


def mamba_names(source: str, target: str, layer: MambaLayer) -> Names:
    """The Mamba-2 names that all families share."""
    names: Names = {
        f"{source}.in_proj.weight": Part(f"{target}.in_proj"),
        f"{source}.conv1d.weight": Part(f"{target}.conv", form=Form.CONV),
        f"{source}.A_log": Part(f"{target}.A", form=Form.A_LOG),
        f"{source}.D": Part(f"{target}.D"),
        f"{source}.dt_bias": Part(f"{target}.dt_bias"),
        f"{source}.norm.weight": Part(f"{target}.norm"),
        f"{source}.out_proj.weight": Part(f"{target}.out_proj"),
    }
    if layer.conv_bias:
        names[f"{source}.conv1d.bias"] = Part(f"{target}.conv_bias")
    if layer.proj_bias:
        names[f"{source}.in_proj.bias"] = Part(f"{target}.in_bias")
        names[f"{source}.out_proj.bias"] = Part(f"{target}.out_bias")
    return names


def two_branch_names(
    spec: ModelSpec,
    *,
    mlp: str,
    mlp_norm: str,
    final_norm: str,
    read_mlp: Callable[[str, str, MlpLayer], Names] = mlp_names,
) -> Names:
    """Names of a decoder whose layers are a mixer (`self_attn` or `mamba`) and an MLP, each behind its own norm."""
    names: Names = {
        "model.embed_tokens.weight": Part("embedding"),
        f"model.{final_norm}.weight": Part("final_norm"),
        "lm_head.weight": Part("lm_head"),
    }
    for source, target, layer in _branches(spec):
        match layer:
            case AttentionLayer():
                names[f"{source}.input_layernorm.weight"] = Part(f"{target}.input_norm")
                names.update(attention_names(f"{source}.self_attn", target, layer))
            case MambaLayer():
                names[f"{source}.input_layernorm.weight"] = Part(f"{target}.input_norm")
                names.update(mamba_names(f"{source}.mamba", target, layer))
            case MlpLayer():
                names[f"{source}.{mlp_norm}.weight"] = Part(f"{target}.input_norm")
                names.update(read_mlp(f"{source}.{mlp}", target, layer))
    return names


def _branches(spec: ModelSpec) -> Iterator[tuple[str, str, AttentionLayer | MambaLayer | MlpLayer]]:
    for i, layer in enumerate(spec.layers):
        yield f"model.layers.{i // 2}", f"layers.{i}", layer
