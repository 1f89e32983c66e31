"""LFM2: a gated short convolution or attention, then a gated MLP, or experts after some dense layers."""

from __future__ import annotations

from functools import partial

from bateleur.mamba import ShortConv
from bateleur.runner.checkpoint.experts import read_experts
from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import (
    ExpertNames,
    Mixers,
    Names,
    StorageForm,
    WeightPart,
    projection,
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
_EXPERTS = ExpertNames(
    branch="feed_forward",
    norm="ffn_norm",
    correction="expert_bias",
    other_up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    other_down=("experts.{}.w2.weight",),
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
    return fields.model(_read_blocks(fields), MlpLayer(_mlp_size(fields)), norm_eps="norm_eps")


def _read_experts(fields: ConfigFields) -> ModelSpec:
    mlp = MlpLayer(fields["intermediate_size"])
    router = RouterSpec(
        scores="sigmoid",
        normalised=fields["norm_topk_prob"],
        sum_eps=1e-6,
        scale=fields["routed_scaling_factor"],
        corrected=fields["use_expert_bias"],
    )
    experts, blocks = read_experts(fields, router), _read_blocks(fields)
    branches = [mlp if i < fields["num_dense_layers"] else experts for i in range(len(blocks))]
    return fields.model(blocks, branches, norm_eps="norm_eps")


def _conv_names(layer: ShortConvLayer) -> Names:
    names = {"conv.weight": WeightPart("conv", form=StorageForm.CONV)}
    if layer.bias:
        names["conv.bias"] = WeightPart("conv_bias")
    return names | projection("in", {"in_proj": None}, layer.bias) | projection("out", {"out_proj": None}, layer.bias)


def _names(spec: ModelSpec) -> Names:
    mixers: Mixers = {
        AttentionLayer: ("self_attn", "operator_norm"),
        ShortConvLayer: ("conv", "operator_norm", _conv_names),
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
