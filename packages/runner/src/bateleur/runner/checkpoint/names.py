"""Which checkpoint tensor fills which part of which weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from bateleur.runner.models.spec import (
    AttentionLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    SingleLayer,
    parts_of,
)


class Form(Enum):
    """How a tensor is written in a checkpoint, where it differs from the weight."""

    PLAIN = "plain"
    CONV = "conv"
    """(C, 1, W) for a weight (C, W)."""
    A_LOG = "A_log"
    """log(-A), for a weight A."""
    LESS_ONE = "less one"
    """w - 1, for a weight w of a norm."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, start + rows) of weight `target`; `rows` None means all of it."""

    target: str
    start: int = 0
    rows: int | None = None
    form: Form = Form.PLAIN
    pieces: tuple[tuple[int, int], ...] = ()
    """Where rows are stored group by group, the rows [first, end) of a group in the order of the weight: of every group
    those of the first piece, then of every group those of the second."""
    factors: tuple[tuple[int | None, float], ...] = ()
    """(rows, factor): so many rows are multiplied by that, then as many as the next says; None is all that remain."""


Names = dict[str, Part]
"""Checkpoint tensor name to the part it fills."""
Called = tuple[str, str]
"""Names of a branch and of the norm in front of it."""
_MIXERS: Mapping[type[SingleLayer], Called] = {
    AttentionLayer: ("self_attn", "input_layernorm"),
    MambaLayer: ("mamba", "input_layernorm"),
}


def weight_names(
    spec: ModelSpec,
    mlp: Called,
    mixers: Mapping[type[SingleLayer], Called] = _MIXERS,
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
        source, parts = f"{stem}.layers.{i // spec.branches_per_layer}", parts_of(layer)
        for j, mixer in enumerate(parts):
            branch, norm = mlp if isinstance(mixer, MlpLayer) else mixers[type(mixer)]
            target = f"layers.{i}.{j}" if isinstance(layer, ParallelLayer) else f"layers.{i}"
            names[f"{source}.{norm}.weight"] = Part(f"layers.{i}.input_norm")
            for name, part in _branch_names(mixer, fused_mlp).items():
                names[f"{source}.{branch}.{name}"] = replace(part, target=f"{target}.{part.target}")
    return names


def norms_less_one(names: Names) -> Names:
    """The same, where norms of the stream, of queries and of keys are stored less one."""
    norms = ("input_norm", "final_norm", "q_norm", "k_norm")
    stored = {name: part for name, part in names.items() if part.target.rpartition(".")[2] in norms}
    return names | {name: replace(part, form=Form.LESS_ONE) for name, part in stored.items()}


def _branch_names(layer: SingleLayer, fused_mlp: bool) -> Names:
    match layer:
        case AttentionLayer():
            return _attention_names(layer)
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
                **({} if layer.norm == "gate only" else {"norm.weight": Part("norm")}),
                **_projection("out", {"out_proj": None}, layer.proj_bias),
            }


def _attention_names(layer: AttentionLayer) -> Names:
    q, kv, lanes = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_dim
    heads = {"q_proj": 2 * q if layer.gated else q, "k_proj": kv, "v_proj": kv}
    names = _projection("qkv", heads, layer.qkv_bias) | _projection("o", {"o_proj": None}, layer.o_bias)
    if layer.gated:  # stored head by head, query and gate; here the gates of all heads come first
        pieces = ((lanes, 2 * lanes), (0, lanes))
        names |= {name: replace(names[name], pieces=pieces) for name in names if name.startswith("q_proj")}
    if layer.qk_norm_eps is not None:
        names |= {f"{norm}.weight": Part(norm) for norm in ("q_norm", "k_norm")}
    return names


def _projection(target: str, sources: Mapping[str, int | None], bias: bool) -> Names:
    """One matrix of the tensors `sources`, one below the other, each with so many rows, and their biases."""
    names, start = {}, 0
    for source, rows in sources.items():
        names[f"{source}.weight"] = Part(f"{target}_proj", start, rows)
        if bias:
            names[f"{source}.bias"] = Part(f"{target}_bias", start, rows)
        start += rows or 0
    return names
