"""Families with Mamba-2 layers or short convolutions: Bamba, Falcon-H1, GraniteMoeHybrid, NemotronH, Mamba-2, LFM2."""

import math
from dataclasses import replace
from functools import partial
from typing import cast

from bateleur.mamba import ShortConv
from bateleur.runner.checkpoint.families.base import INERT, Family, MtpNames
from bateleur.runner.checkpoint.fields import LOCAL_FIELDS, ConfigFields
from bateleur.runner.checkpoint.names import (
    Called,
    ExpertNames,
    Names,
    StorageForm,
    WeightPart,
    projection,
    weight_names,
    whole,
)
from bateleur.runner.models.spec import (
    Activation,
    AttentionLayer,
    ExpertsLayer,
    GatedNorm,
    Layer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    RouterSpec,
    ShortConvLayer,
)
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.device import DTYPES

# --- Bamba: a Mamba-2 mixer or attention with partial rotary embedding, then a gated MLP --------------------------


def _bamba(fields: ConfigFields) -> ModelSpec:
    indices, num_layers = fields.raw("attn_layer_indices") or [], fields["num_hidden_layers"]
    if bad := [i for i in indices if not 0 <= i < num_layers]:
        raise ValueError(f"attn_layer_indices holds {bad[0]}; it must be in [0, num_hidden_layers = {num_layers})")
    attention, mamba = fields.attention(rope=fields.rope(partial=True)), fields.mamba()
    return fields.model([attention if i in indices else mamba for i in range(num_layers)], fields.gated_mlp())


_feed_forward_names = partial(
    weight_names, mlp=Called("feed_forward", "pre_ff_layernorm"), final_norm="final_layernorm"
)

# --- Falcon-H1: parallel attention and Mamba-2 in every layer, then a gated MLP, with multipliers ------------------


def _falcon_h1(fields: ConfigFields) -> ModelSpec:
    """Read Falcon-H1. Multipliers cost no time: they are in weights (`_fold`), attention scales, or layer factors."""
    if fields["projectors_bias"] != fields["mamba_proj_bias"]:
        raise ValueError(
            f"projectors_bias is {fields['projectors_bias']}; it must equal mamba_proj_bias = "
            f"{fields['mamba_proj_bias']}"
        )
    norm: GatedNorm = "norm first" if fields["mamba_norm_before_gate"] else "gate first"
    mamba = replace(fields.mamba(), norm=norm if fields["mamba_rms_norm"] else "gate only")
    # Queries, keys and values are linear in the input: its multiplier applies twice to scores and once to outputs.
    inward = fields["attention_in_multiplier"]
    attention = fields.attention(scale=fields.head_dim() ** -0.5 * fields["key_multiplier"] * inward**2)
    outward = (fields["ssm_out_multiplier"], fields["attention_out_multiplier"] * inward)
    return fields.model(
        (ParallelLayer((mamba, attention), outward),) * fields["num_hidden_layers"],
        ParallelLayer((fields.gated_mlp(),), (fields["mlp_multipliers"][1],)),
        embedding_multiplier=fields["embedding_multiplier"],
        logits_divisor=1.0 / fields["lm_head_multiplier"],
    )


def _fold(fields: ConfigFields, names: Names) -> Names:
    """Return `names` with factors: the config's multipliers of the MLP's gate, Mamba's inputs and attention biases."""
    groups, heads = fields["mamba_n_groups"] * fields["mamba_d_state"], fields["mamba_n_heads"]
    inner, inward = heads * fields["mamba_d_head"], fields["ssm_in_multiplier"]
    rows = (inner, inner, groups, groups, heads)
    biases = tuple(zip(rows, fields["ssm_multipliers"], strict=True))
    factors = {
        "mamba.in_proj.weight": tuple((count, inward * factor) for count, factor in biases),
        "mamba.in_proj.bias": biases,
        "feed_forward.gate_proj.weight": ((None, fields["mlp_multipliers"][0]),),
        "feed_forward.gate_proj.bias": ((None, fields["mlp_multipliers"][0]),),
    }
    # Input multipliers of attention apply to biases here, but not in the file.
    factors |= {f"self_attn.{name}_proj.bias": ((None, 1.0 / fields["attention_in_multiplier"]),) for name in "qkvo"}
    scaled = {name: factors.get(".".join(name.rsplit(".", 3)[1:]), ()) for name in names}
    return {name: replace(part, factors=scaled[name]) for name, part in names.items()}


# --- GraniteMoeHybrid: Mamba-2 or attention, then a gated MLP, optionally with experts, and four multipliers -------


_fused_mlp_names = whole(up="input_linear", down="output_linear")
_GRANITE_EXPERTS = ExpertNames(
    branch="block_sparse_moe",
    router="router.layer.weight",
    other_router=("router.weight",),
    up="input_linear.weight",
    other_up=("experts.gate_up_proj",),
    down="output_linear.weight",
    other_down=("experts.down_proj",),
    shared="shared_mlp",
    shared_names=_fused_mlp_names,
)


def _granitemoehybrid(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    mlp: Layer = (shared := MlpLayer(fields["shared_intermediate_size"]))
    if fields["num_local_experts"]:
        mlp = fields.experts(RouterSpec(), LOCAL_FIELDS, shared=shared)

    def attention() -> Layer:
        # Anything but "rope" means no position code at all: the Mamba layers carry the order.
        rope = fields.rope() if fields.raw("position_embedding_type") == "rope" else None
        return fields.attention(rope=rope, scale=fields["attention_multiplier"])

    blocks = fields.layers("layer_types", {"full_attention": attention, "linear_attention": fields.mamba})
    return fields.model(blocks, mlp, **fields.granite_multipliers())


# --- NemotronH: one branch per layer (Mamba-2, attention without rotary embedding, an ungated MLP or experts) ------

_CALLED = Called("mixer", "norm")
_MAMBA_FIELDS = {
    "activation": "mamba_hidden_act",
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size",
    "num_groups": "n_groups",
    "conv_width": "conv_kernel",
    "chunk_size": "chunk_size",
    "conv_bias": "use_conv_bias",
    "proj_bias": "use_bias",
    "norm_eps": "layer_norm_epsilon",
}
_EXPERTS = ExpertNames(
    branch="mixer",
    norm="norm",
    up="experts.up_proj",
    other_up=("experts.{}.up_proj.weight",),
    shared="mixer.shared_experts",
)
_READ = (
    "vocab_size hidden_size layers_block_type layer_norm_epsilon max_position_embeddings residual_in_fp32 "
    "tie_word_embeddings eos_token_id intermediate_size mlp_bias mlp_hidden_act "
    "num_attention_heads num_key_value_heads head_dim time_step_min mamba_ssm_cache_dtype "
    "n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
    "n_group topk_group norm_topk_prob routed_scaling_factor num_nextn_predict_layers mtp_layers_block_type"
)
_UNREAD = (
    "expand mamba_proj_bias moe_shared_expert_overlap n_shared_experts num_logits_to_keep rescale_prenorm_residual "
    "sliding_window time_step_floor time_step_limit time_step_max use_mamba_kernels"
)


def _nemotron_h(fields: ConfigFields, listed: str = "layers_block_type") -> ModelSpec:
    def mamba() -> Layer:
        dtype = fields.choice("mamba_ssm_cache_dtype", ("float32", "float16", "bfloat16"))
        # transformers clamps dt to (time_step_min, inf) and leaves `time_step_limit` unread; logits agree with it.
        return fields.mamba(_MAMBA_FIELDS, (fields["time_step_min"], math.inf), DTYPES[dtype])

    def mlp(size: str = "intermediate_size") -> MlpLayer:
        activation = cast(Activation, fields.choice("mlp_hidden_act", ("relu2", "silu")))
        return MlpLayer(fields[size], activation, gated=False, bias=fields["mlp_bias"])

    def experts() -> Layer:
        shared = mlp("moe_shared_expert_intermediate_size")
        return fields.experts(
            fields.sigmoid_router("n_routed_experts"),
            {"num_experts": "n_routed_experts"},
            activation=shared.activation,
            gated=False,
            shared=shared,
            latent_size=fields.optional("moe_latent_size"),
            latent_bias=shared.bias,
        )

    def attention() -> Layer:
        # `attention_bias` and `sliding_window` exist in the configuration, and no version of the model reads them.
        return fields.attention(rope=None, bias=False)

    readers = {"linear_attention": mamba, "full_attention": attention, "mlp": mlp, "moe": experts}
    layers, wide = fields.layers(listed, readers), fields["residual_in_fp32"]
    return fields.model(layers, norm_eps="layer_norm_epsilon", residual_in_fp32=wide)


def _mtp_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[tuple[Layer, ...], int]:
    modules = fields.raw("num_nextn_predict_layers")
    if modules != 1:
        refuse("num_nextn_predict_layers", modules, "1: a head of one module, which is fed its own output")
    return _nemotron_h(fields, "mtp_layers_block_type").layers, spec.branches_per_layer


# --- Mamba-2: one mixer per layer, without attention, MLP or position limit ----------------------------------------

_MAMBA2_FIELDS = _MAMBA_FIELDS | {
    "activation": "hidden_act",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "state_size": "state_size",
}
_LENGTHS = 2048, (1 << 31) - 1
"""Default and maximum request length in tokens. The configuration has no limit; the default is vLLM's."""


def _mamba2(fields: ConfigFields) -> ModelSpec:
    mamba, expanded = fields.mamba(_MAMBA2_FIELDS), fields["expand"] * fields["hidden_size"]
    if mamba.state.inner_size != expanded:
        raise ValueError(
            f"num_heads * head_dim is {mamba.state.inner_size}; it must equal expand * hidden_size = {expanded}"
        )
    return fields.model(
        (mamba,) * fields["num_hidden_layers"],
        norm_eps="layer_norm_epsilon",
        lengths=_LENGTHS,
        residual_in_fp32=fields["residual_in_fp32"],
    )


_backbone_names = partial(
    weight_names,
    mlp=_CALLED,
    mixers={AttentionLayer: _CALLED, MambaLayer: _CALLED, ExpertsLayer: _EXPERTS},
    stem="backbone",
    embedding="embeddings",
    final_norm="norm_f",
)

# --- LFM2: a gated short convolution or attention, then a gated MLP, or experts after some dense layers -----------

_LFM2_CHUNK = 128
"""Tokens between two windows that may be kept within a prompt; a convolution has no chunks."""
_LFM2_EXPERTS = ExpertNames(
    branch="feed_forward",
    norm="ffn_norm",
    correction="expert_bias",
    other_up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    other_down=("experts.{}.w2.weight",),
)
_LFM2_RENAMED = {
    "self_attn.o_proj.": "self_attn.out_proj.",
    "self_attn.q_norm.": "self_attn.q_layernorm.",
    "self_attn.k_norm.": "self_attn.k_layernorm.",
    "feed_forward.gate_proj.": "feed_forward.w1.",
    "feed_forward.up_proj.": "feed_forward.w3.",
    "feed_forward.down_proj.": "feed_forward.w2.",
}


def _lfm2_blocks(fields: ConfigFields) -> tuple[Layer, ...]:
    def conv() -> Layer:
        state = ShortConv(fields["hidden_size"], conv_width=fields["conv_L_cache"])
        return ShortConvLayer(state, _LFM2_CHUNK, fields["conv_bias"])

    def attention() -> Layer:
        return fields.attention(bias=False, qk_norm_eps=fields["norm_eps"])

    return fields.layers("layer_types", {"conv": conv, "full_attention": attention})


def _lfm2_mlp_size(fields: ConfigFields) -> int:
    """Return `intermediate_size`; with `block_auto_adjust_ff_dim` two thirds of it, scaled and rounded up.

    The factor is `block_ffn_dim_multiplier`; the size is a multiple of `block_multiple_of`.
    """
    size = int(fields["intermediate_size"])
    if not fields["block_auto_adjust_ff_dim"]:
        return size
    size, step = int(fields["block_ffn_dim_multiplier"] * int(2 * size / 3)), fields["block_multiple_of"]
    return int(-(-size // step) * step)


def _lfm2_dense(fields: ConfigFields) -> ModelSpec:
    return fields.model(_lfm2_blocks(fields), MlpLayer(_lfm2_mlp_size(fields)), norm_eps="norm_eps")


def _lfm2_moe(fields: ConfigFields) -> ModelSpec:
    mlp = MlpLayer(fields["intermediate_size"])
    router = RouterSpec(
        scores="sigmoid",
        normalised=fields["norm_topk_prob"],
        sum_eps=1e-6,
        scale=fields["routed_scaling_factor"],
        corrected=fields["use_expert_bias"],
    )
    experts, blocks = fields.experts(router), _lfm2_blocks(fields)
    branches = [mlp if i < fields["num_dense_layers"] else experts for i in range(len(blocks))]
    return fields.model(blocks, branches, norm_eps="norm_eps")


def _short_conv_names(layer: ShortConvLayer) -> Names:
    names = {"conv.weight": WeightPart("conv", form=StorageForm.CONV)}
    if layer.bias:
        names["conv.bias"] = WeightPart("conv_bias")
    return names | projection("in", {"in_proj": None}, layer.bias) | projection("out", {"out_proj": None}, layer.bias)


def _lfm2_names(spec: ModelSpec) -> Names:
    conv = Called("conv", "operator_norm", _short_conv_names)
    names = weight_names(
        spec,
        Called("feed_forward", "ffn_norm"),
        {AttentionLayer: Called("self_attn", "operator_norm"), ShortConvLayer: conv, ExpertsLayer: _LFM2_EXPERTS},
        final_norm="embedding_norm",
    )
    for ours, theirs in _LFM2_RENAMED.items():
        names = {name.replace(ours, theirs): part for name, part in names.items()}
    return names


_lfm2 = partial(Family, names=_lfm2_names, kinds=("conv", "full_attention"), needs=("layer_types", "full_attn_idxs"))
FAMILIES = (
    Family("bamba", "BambaForCausalLM", _bamba, _feed_forward_names),
    Family("falcon_h1", "FalconH1ForCausalLM", _falcon_h1, _feed_forward_names, fold=_fold),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granitemoehybrid,
        partial(
            weight_names,
            mlp=Called("shared_mlp", "post_attention_layernorm", _fused_mlp_names),
            mixers={ExpertsLayer: _GRANITE_EXPERTS},
        ),
        needs=("layer_types", "layers_block_type"),
    ),
    _lfm2("lfm2", "Lfm2ForCausalLM", _lfm2_dense),
    _lfm2("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2_moe),
    Family("mamba2", "Mamba2ForCausalLM", _mamba2, _backbone_names),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        _nemotron_h,
        _backbone_names,
        other_prefixes=(("model.", "backbone."),),
        mtp=MtpNames(
            layers=_mtp_layers,
            token_norm="layers.0.enorm",
            hidden_norm="layers.0.hnorm",
            fc="layers.0.eh_proj",
            final_norm="layers.{last}.final_layernorm",
        ),
        plain=INERT.union(_READ.split(), _UNREAD.split(), _MAMBA_FIELDS.values()),
        needs=("layers_block_type", "hybrid_override_pattern"),
    ),
)
