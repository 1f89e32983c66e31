"""LFM2: a gated short convolution or attention, then a gated MLP, or experts after some dense layers."""

from __future__ import annotations

from functools import partial

from bateleur.mamba import ShortConv
from bateleur.runner.checkpoint.experts import read_experts
from bateleur.runner.checkpoint.families.base import Family, followed, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import (
    MIXERS,
    ExpertNames,
    LayerTensorNames,
    Names,
    StorageForm,
    WeightPart,
    weight_names,
)
from bateleur.runner.models.spec import (
    AttentionLayer,
    ExpertsLayer,
    Layer,
    MlpLayer,
    ModelSpec,
    RouterSpec,
    ShortConvLayer,
)

_CHUNK = 128
"""Tokens between two windows that may be kept within a prompt; a convolution has no chunks."""
_MOE = "feed_forward"
_EXPERTS = ExpertNames(
    norm="ffn_norm",
    router=f"{_MOE}.gate.weight",
    correction=f"{_MOE}.expert_bias",
    up=f"{_MOE}.experts.gate_up_proj",
    other_up=(f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight"),
    down=f"{_MOE}.experts.down_proj",
    other_down=(f"{_MOE}.experts.{{}}.w2.weight",),
)
_RENAMED = {
    "self_attn.o_proj.": "self_attn.out_proj.",
    "self_attn.q_norm.": "self_attn.q_layernorm.",
    "self_attn.k_norm.": "self_attn.k_layernorm.",
    "feed_forward.gate_proj.": "feed_forward.w1.",
    "feed_forward.up_proj.": "feed_forward.w3.",
    "feed_forward.down_proj.": "feed_forward.w2.",
}


def _read_blocks(fields: ConfigFields) -> tuple[Layer, ...]:
    """Return the convolution or attention of each layer."""

    def conv() -> Layer:
        state = ShortConv(fields["hidden_size"], conv_width=fields["conv_L_cache"])
        return ShortConvLayer(state, _CHUNK, fields["conv_bias"])

    def attention() -> Layer:
        return fields.attention(bias=False, qk_norm_eps=fields["norm_eps"])

    return read_layers(fields, "layer_types", {"conv": conv, "full_attention": attention})


def _mlp_size(fields: ConfigFields) -> int:
    """Return two thirds of `intermediate_size`, scaled and rounded up; all of it without `block_auto_adjust_ff_dim`."""
    size = int(fields["intermediate_size"])
    if not fields["block_auto_adjust_ff_dim"]:
        return size
    size, step = int(fields["block_ffn_dim_multiplier"] * int(2 * size / 3)), fields["block_multiple_of"]
    return int(-(-size // step) * step)


def _read_dense(fields: ConfigFields) -> ModelSpec:
    return fields.model(followed(_read_blocks(fields), MlpLayer(_mlp_size(fields))), "norm_eps")


def _read_experts(fields: ConfigFields) -> ModelSpec:
    mlp = MlpLayer(fields["intermediate_size"])
    router = RouterSpec(
        scores="sigmoid",
        normalised=fields["norm_topk_prob"],
        sum_eps=1e-6,
        scale=fields["routed_scaling_factor"],
        corrected=fields["use_expert_bias"],
    )
    experts, dense = read_experts(fields, router), fields["num_dense_layers"]
    pairs = ((block, mlp if i < dense else experts) for i, block in enumerate(_read_blocks(fields)))
    return fields.model(tuple(layer for pair in pairs for layer in pair), "norm_eps")


def _conv_names(layer: ShortConvLayer) -> Names:
    names = {"conv.weight": WeightPart("conv", form=StorageForm.CONV)}
    names |= {f"{name}_proj.weight": WeightPart(f"{name}_proj") for name in ("in", "out")}
    if layer.bias:
        names |= {"conv.bias": WeightPart("conv_bias")}
        names |= {f"{name}_proj.bias": WeightPart(f"{name}_bias") for name in ("in", "out")}
    return names


def _names(spec: ModelSpec) -> Names:
    mixers = {
        **MIXERS,
        AttentionLayer: ("self_attn", "operator_norm"),
        ShortConvLayer: LayerTensorNames(("conv", "operator_norm"), _conv_names),
        ExpertsLayer: _EXPERTS,
    }
    names = weight_names(spec, ("feed_forward", "ffn_norm"), mixers, final_norm="embedding_norm")
    return {_renamed(name): part for name, part in names.items()}


def _renamed(name: str) -> str:
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return name


_lfm2 = partial(Family, names=_names, kinds=("conv", "full_attention"), needs=("layer_types", "full_attn_idxs"))
FAMILIES = (_lfm2("lfm2", "Lfm2ForCausalLM", _read_dense), _lfm2("lfm2_moe", "Lfm2MoeForCausalLM", _read_experts))
