"""Families with delta rules: Qwen3.5, Qwen3-Next, OLMo-hybrid and Kimi Linear."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from bateleur.mamba import GatedDelta, KimiDelta
from bateleur.runner.checkpoint.families.base import Family, MtpNames
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import (
    Called,
    ExpertNames,
    Names,
    StorageForm,
    WeightPart,
    norms_less_one,
    projection,
    stacked,
    weight_names,
)
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    Layer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    RouterSpec,
)
from bateleur.runner.utils.arguments import refuse

_CHUNK = 64
"""Tokens of a chunk in a scan; configurations have no such field."""


def _gated_delta(fields: ConfigFields, norm_eps: float, *, allow_neg_eigval: bool = False) -> DeltaLayer:
    """Read a gated delta net from the fields `linear_*`.

    norm_eps: epsilon of the output norm. allow_neg_eigval: see `GatedDelta`.
    """
    fields.choice("hidden_act", ("silu",))
    fields.divides("linear_num_key_heads", "linear_num_value_heads")
    state = GatedDelta(
        fields["linear_num_key_heads"],
        fields["linear_num_value_heads"],
        fields["linear_key_head_dim"],
        fields["linear_value_head_dim"],
        allow_neg_eigval,
        conv_width=fields["linear_conv_kernel_dim"],
    )
    return DeltaLayer(state, _CHUNK, norm_eps)


def _delta_names(
    layer: DeltaLayer, sources: Mapping[str, str], norm: str = "norm", out: str = "out_proj", *, packed: bool = False
) -> Names:
    """Return the weight names of a delta layer.

    sources: for each matrix in the file, the parts of the input projection that it stacks by rows, as letters in their
    order, such as "qkvz": q, k, v, z (gate), b (beta), a (decay). norm, out: names of the output norm and the output
    projection. packed: whether files store the rows by key head: all parts of the first head, then of the second.
    """
    (key_heads, value_heads), channels, rank = layer.state.heads, _channels(layer), layer.rank
    sizes = dict(zip("qkvzba", (*channels, rank or channels[2], value_heads, rank or value_heads), strict=True))
    names = projection("in", {source: sum(sizes[part] for part in parts) for source, parts in sources.items()})
    for source, parts in sources.items() if packed else ():
        ends = accumulate(sizes[part] // key_heads for part in parts)
        names[f"{source}.weight"] = replace(names[f"{source}.weight"], pieces=tuple(pairwise([0, *ends])))
    return names | {
        "A_log": WeightPart("A", form=StorageForm.A_LOG),
        "dt_bias": WeightPart("dt_bias"),
        f"{norm}.weight": WeightPart("norm"),
        f"{out}.weight": WeightPart("out_proj"),
        "conv1d.weight": WeightPart("conv", form=StorageForm.CONV),
    }


def _separate_convolutions(layer: DeltaLayer) -> Names:
    """Return the tensor names of a convolution that some files store as one tensor and others as three.

    Its name is `conv1d.weight`; `WeightPart.instead` names the tensors of q, k and v (`q_conv1d.weight` etc.).
    """
    rows = dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), _channels(layer), strict=True))
    apart = {name: replace(part, form=StorageForm.CONV) for name, part in stacked("conv", rows).items()}
    return {"conv1d.weight": WeightPart("conv", form=StorageForm.CONV, instead=apart)}


def _channels(layer: DeltaLayer) -> tuple[int, int, int]:
    """Return the numbers of rows for queries, keys and values in the input projection."""
    (key_heads, value_heads), (key_dim, value_dim) = layer.state.heads, layer.state.head_dims
    return key_heads * key_dim, key_heads * key_dim, value_heads * value_dim


# --- Qwen3.5 and Qwen3-Next: gated delta nets or gated attention, then a gated MLP or experts -----------------------


def _qwen_blocks(fields: ConfigFields) -> tuple[Layer, ...]:
    def attention() -> Layer:
        if fields.raw("attn_output_gate") is False:
            raise ValueError("attn_output_gate is False; supported is True")
        return fields.attention(rope=fields.rope(partial=True), qk_norm_eps=fields["rms_norm_eps"], gated=True)

    fields.choice("hidden_act", ("silu",))
    delta = partial(_gated_delta, fields, fields["rms_norm_eps"])
    return fields.layers("layer_types", {"linear_attention": delta, "full_attention": attention})


def _qwen_experts(fields: ConfigFields, *, normalised: bool = True) -> ExpertsLayer:
    shared = MlpLayer(fields["shared_expert_intermediate_size"])
    return fields.experts(RouterSpec(normalised=normalised), shared=shared, shared_gate=True)


def _qwen3_5(fields: ConfigFields) -> ModelSpec:
    return fields.model(_qwen_blocks(fields), MlpLayer(fields["intermediate_size"]), exact_norms=True)


def _qwen3_5_moe(fields: ConfigFields) -> ModelSpec:
    return fields.model(_qwen_blocks(fields), _qwen_experts(fields), exact_norms=True)


def _qwen3_next(fields: ConfigFields) -> ModelSpec:
    blocks, experts = _qwen_blocks(fields), _qwen_experts(fields, normalised=fields["norm_topk_prob"])
    branches = fields.sparse_layers(len(blocks), MlpLayer(fields["intermediate_size"]), experts)
    return fields.model(blocks, branches, exact_norms=True)


def _qwen_names(spec: ModelSpec, sources: Mapping[str, str], *, packed: bool = False) -> Names:
    """Return the weight names of a decoder. sources, packed: parts stacked in each file matrix, see `_delta_names`."""
    names = partial(_delta_names, sources=sources, packed=packed)
    return norms_less_one(weight_names(spec, mixers={DeltaLayer: Called("linear_attn", "input_layernorm", names)}))


def _mtp_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[tuple[Layer, ...], int]:
    """Return the branches (attention, then MLP or experts) of the MTP head's only layer, and the number of branches.

    They equal the branches of the target's last attention layer. Raises ValueError for another kind of MTP head.
    """
    count, dedicated = fields.raw("mtp_num_hidden_layers"), fields.raw("mtp_use_dedicated_embeddings")
    if count not in (None, 1):
        refuse("mtp_num_hidden_layers", count, "1: a head of one layer, which is fed its own output")
    if dedicated:
        refuse("mtp_use_dedicated_embeddings", dedicated, "false: the embedding of a head is the target's")
    each = spec.branches_per_layer
    layers = [spec.layers[i : i + each] for i in range(0, len(spec.layers), each)]
    like = [layer for layer in layers if isinstance(layer[0], AttentionLayer)]
    if not like:
        raise ValueError("layer_types has no 'full_attention', which the layer of an MTP head is like")
    return like[-1], each


# --- OLMo-hybrid: gated delta nets with norms before them, or attention with norms after it, then a gated MLP -------

_OUTPUT_NORM_EPS = 1e-5  # output norm of a delta net; not in the configuration


def _olmo_hybrid(fields: ConfigFields) -> ModelSpec:
    mlp = MlpLayer(fields["intermediate_size"])

    def delta() -> Layer:
        return _gated_delta(fields, _OUTPUT_NORM_EPS, allow_neg_eigval=fields["linear_allow_neg_eigval"])

    def attention() -> Layer:
        parameters = fields.raw("rope_parameters")  # None in published models, whose delta nets carry the order
        rope = None if not parameters or parameters.get("rope_theta") is None else fields.rope()
        made = fields.attention(rope=rope, qk_norm_eps=fields["rms_norm_eps"], qk_norm_whole=True)
        return ParallelLayer((made,), norm_last=True)

    blocks = fields.layers("layer_types", {"linear_attention": delta, "full_attention": attention})
    after = ParallelLayer((mlp,), norm_last=True)
    return fields.model(blocks, [after if isinstance(block, ParallelLayer) else mlp for block in blocks])


def _olmo_delta_names(layer: DeltaLayer) -> Names:
    sources = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}
    return _delta_names(layer, sources, "o_norm", "o_proj") | _separate_convolutions(layer)


def _olmo_hybrid_names(spec: ModelSpec) -> Names:
    """Return all weight names, with OLMo's names of norms; transformers' are in `WeightPart.instead`."""
    named: Names = {}
    before = {
        "input_layernorm": ("attention_layer_norm", "input_layernorm"),
        "post_attention_layernorm": ("feedforward_layer_norm", "post_attention_layernorm"),
    }
    after = {
        "input_layernorm": ("post_attention_layernorm", "feedforward_layer_norm"),
        "post_attention_layernorm": ("post_feedforward_layernorm",),
    }
    usual = weight_names(spec, mixers={DeltaLayer: Called("linear_attn", "input_layernorm", _olmo_delta_names)})
    for name, part in usual.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in before:
            named[name] = part
            continue
        kind = spec.layers[int(part.target.split(".")[1])]
        first, *others = (after if isinstance(kind, ParallelLayer) else before)[norm]
        instead = {f"{layer}.{other}.weight": part for other in others}
        named[f"{layer}.{first}.weight"] = WeightPart(part.target, instead=instead)
    return named


# --- Kimi Linear: Kimi delta attention or latent attention without positions, then a gated MLP or experts -----------

_LATENT_NORM_EPS = 1e-6  # not in the configuration
_EXPERTS = ExpertNames(
    branch="block_sparse_moe",
    other_up=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    other_down=("experts.{}.w2.weight",),
    shared="block_sparse_moe.shared_experts",
)


def _kimi_linear(fields: ConfigFields) -> ModelSpec:
    def delta() -> Layer:
        size = fields["linear_head_dim"]
        state = KimiDelta(fields["linear_num_heads"], size, size, conv_width=fields["linear_conv_kernel_dim"])
        return DeltaLayer(state, _CHUNK, fields["rms_norm_eps"], gate_activation="sigmoid", rank=size)

    def sparse() -> Layer:
        shared = MlpLayer(fields.at_least_1("moe_intermediate_size") * fields["num_shared_experts"])
        router = fields.sigmoid_router("num_experts")
        return fields.experts(router, {"top_k": "num_experts_per_token"}, shared=shared)

    fields.choice("hidden_act", ("silu",))
    return fields.model(
        fields.layers("layer_types", {"linear_attention": delta, "full_attention": partial(_latent, fields)}),
        fields.layers("mlp_layer_types", {"dense": lambda: MlpLayer(fields["intermediate_size"]), "sparse": sparse}),
    )


def _latent(fields: ConfigFields) -> Layer:
    heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    if keys != heads:
        raise ValueError(f"num_key_value_heads is {keys}; it must equal num_attention_heads = {heads}")
    for name, only in (("q_lora_rank", None), ("attention_bias", False), ("mla_use_nope", True)):
        if (value := fields.raw(name)) not in (None, only):
            raise ValueError(f"{name} is {value!r}; supported is {only}")
    own, shared, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return LatentLayer(
        heads,
        heads,
        max(own + shared, value),
        (own + shared) ** -0.5,
        rank=fields["kv_lora_rank"],
        key_dim=own,
        shared_dim=shared,
        value_dim=value,
        norm_eps=_LATENT_NORM_EPS,
    )


def _kimi_delta_names(layer: DeltaLayer) -> Names:
    """Return the weight names of a layer whose gate and decay are products of two matrices."""
    sources = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_a_proj": "z", "b_proj": "b", "f_a_proj": "a"}
    heads, key_dim = layer.state.heads[1], layer.state.head_dims[0]
    return {
        **_delta_names(layer, sources, "o_norm", "o_proj"),
        "g_b_proj.weight": WeightPart("gate_proj"),
        "f_b_proj.weight": WeightPart("decay_proj"),
        "A_log": WeightPart("A", form=StorageForm.A_LOG, stored=(1, 1, heads, 1)),
        "dt_bias": WeightPart("dt_bias", stored=(heads * key_dim,)),
        **_separate_convolutions(layer),
    }


def _latent_names(layer: LatentLayer) -> Names:
    queries, latent = layer.num_heads * (layer.key_dim + layer.shared_dim), layer.rank + layer.shared_dim
    return {
        **projection("in", {"q_proj": queries, "kv_a_proj_with_mqa": latent}),
        "kv_a_layernorm.weight": WeightPart("latent_norm"),
        "kv_b_proj.weight": WeightPart("latent_proj"),
        "o_proj.weight": WeightPart("o_proj"),
    }


def _kimi_names(spec: ModelSpec) -> Names:
    delta, latent = (Called("self_attn", "input_layernorm", names) for names in (_kimi_delta_names, _latent_names))
    names = weight_names(spec, mixers={DeltaLayer: delta, LatentLayer: latent, ExpertsLayer: _EXPERTS})
    # transformers writes the dense layers, too, under the name of the experts.
    return {
        name: replace(part, instead={name.replace(".mlp.", f".{_EXPERTS.branch}."): part}) if ".mlp." in name else part
        for name, part in names.items()
    }


_of_kinds = partial(Family, kinds=("linear_attention", "full_attention"))
_qwen = partial(
    _of_kinds,
    mtp=MtpNames(
        layers=_mtp_layers,
        token_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        fc="fc",
        final_norm="norm",
    ),
    needs=("layer_types", "full_attention_interval"),
)
_QWEN3_5 = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
_QWEN3_NEXT = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
_qwen_in_larger = partial(
    _qwen, names=partial(_qwen_names, sources=_QWEN3_5), other_prefixes=(("model.language_model.", "model."),)
)
_KIMI_NEEDS = ("layer_types", "linear_attn_config")
FAMILIES = (
    _of_kinds("kimi_linear", "KimiLinearForCausalLM", _kimi_linear, _kimi_names, needs=_KIMI_NEEDS),
    _of_kinds("olmo_hybrid", "OlmoHybridForCausalLM", _olmo_hybrid, _olmo_hybrid_names, needs=("layer_types",)),
    _qwen_in_larger("qwen3_5", "Qwen3_5ForConditionalGeneration", _qwen3_5, inside="text_config"),
    _qwen_in_larger("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _qwen3_5_moe, inside="text_config"),
    _qwen_in_larger("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    _qwen_in_larger("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5),
    _qwen("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next, partial(_qwen_names, sources=_QWEN3_NEXT, packed=True)),
)
