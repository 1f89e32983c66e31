"""Llama and families like it: attention in every layer, then a gated MLP or experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from bateleur.runner.checkpoint.families.base import INERT, Family
from bateleur.runner.checkpoint.fields import LOCAL_FIELDS, WINDOW_KINDS, ConfigFields
from bateleur.runner.checkpoint.names import Called, ExpertNames, Names, WeightPart, norms_less_one, weight_names, whole
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, MlpLayer, ModelSpec, ParallelLayer, RouterSpec
from bateleur.runner.utils.arguments import refuse

_READ = (
    "vocab_size hidden_size num_hidden_layers rms_norm_eps max_position_embeddings tie_word_embeddings eos_token_id "
    "hidden_act intermediate_size mlp_bias num_attention_heads num_key_value_heads head_dim rope_parameters"
)


def _equal_layers(fields: ConfigFields, attention: AttentionLayer, **multipliers: Any) -> ModelSpec:
    return fields.model((attention,) * fields["num_hidden_layers"], fields.gated_mlp(), **multipliers)


def _llama(fields: ConfigFields) -> ModelSpec:
    return _equal_layers(fields, fields.attention())


def _mistral(fields: ConfigFields) -> ModelSpec:
    """Llama, with one sliding window in all layers or none."""
    return _equal_layers(fields, fields.attention(bias=False, sliding_window=fields.optional("sliding_window")))


def _granite(fields: ConfigFields) -> ModelSpec:
    """Llama with multipliers of embeddings, attention scores, outputs of attention and MLP, and logits."""
    return _equal_layers(fields, fields.attention(scale=fields["attention_multiplier"]), **fields.granite_multipliers())


def _phi3(fields: ConfigFields) -> ModelSpec:
    """Phi-3 and Phi-4: Llama in fused matrices, with partly rotary embedding and one sliding window or none."""
    window = fields.optional("sliding_window")
    return _equal_layers(fields, fields.attention(rope=fields.rope(partial=True), bias=False, sliding_window=window))


def _qwen2(fields: ConfigFields) -> ModelSpec:
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and a sliding window in some layers."""
    return fields.model(fields.windows(fields.attention(bias=True, o_bias=False)), fields.gated_mlp())


def _qwen3(fields: ConfigFields) -> ModelSpec:
    """Llama with a norm of each head of queries and keys, and a sliding window in some layers."""
    return fields.model(fields.windows(fields.attention(qk_norm_eps=fields["rms_norm_eps"])), fields.gated_mlp())


def _qwen3_moe(fields: ConfigFields) -> ModelSpec:
    """Qwen3's attention, with one sliding window in all layers or none, then experts or a gated MLP."""
    window, count = fields.optional("sliding_window"), fields["num_hidden_layers"]
    attention = fields.attention(qk_norm_eps=fields["rms_norm_eps"], sliding_window=window)
    experts = fields.experts(RouterSpec(normalised=fields["norm_topk_prob"]))
    return fields.model((attention,) * count, fields.sparse_layers(count, fields.gated_mlp(), experts))


def _smollm3(fields: ConfigFields) -> ModelSpec:
    """Llama, in which some layers have no rotary embedding, and some may have a sliding window."""
    blocks, rotary = fields.windows(fields.attention()), fields["no_rope_layers"]
    if len(rotary) < len(blocks):
        raise ValueError(f"no_rope_layers has {len(rotary)} entries; it must have num_hidden_layers = {len(blocks)}")
    blocks = tuple(block if rotary[i] else replace(block, rope=None) for i, block in enumerate(blocks))
    return fields.model(blocks, fields.gated_mlp())


def _alternating(fields: ConfigFields, **attention: Any) -> tuple[AttentionLayer, ...]:
    """Return the attention layers, full or windowed as the file lists them, with norms of queries and keys.

    Full and windowed layers have different rotary embeddings. attention: arguments of `ConfigFields.attention`.
    """
    rope, windowed = (fields.rope(layer_type=kind) for kind in WINDOW_KINDS)
    full = fields.attention(rope=rope, qk_norm_eps=fields["rms_norm_eps"], **attention)
    return fields.windows(full, rope=windowed)


def _olmo3(fields: ConfigFields) -> ModelSpec:
    """Llama with a sliding window in most layers, and norms after attention and MLP."""
    blocks = _alternating(fields, qk_norm_whole=True)
    mlp = ParallelLayer((fields.gated_mlp(),), norm_last=True)
    return fields.model([ParallelLayer((block,), norm_last=True) for block in blocks], mlp)


def _gemma3(fields: ConfigFields) -> ModelSpec:
    """Attention with a sliding window in most layers, then a gated MLP, with norms before and after each."""
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",))
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.raw(name):
            refuse(name, fields.raw(name), "null or false: other values are not supported")
    blocks = _alternating(fields, scale=fields["query_pre_attn_scalar"] ** -0.5)
    mlp = MlpLayer(fields["intermediate_size"], "gelu_tanh")
    return fields.model(
        [ParallelLayer((block,), output_norm=True) for block in blocks],
        ParallelLayer((mlp,), output_norm=True),
        embedding_multiplier=fields["hidden_size"] ** 0.5,
        rounds_multiplier=True,
        exact_norms=True,
    )


def _gemma3_names(spec: ModelSpec) -> Names:
    names = weight_names(spec, Called("mlp", "pre_feedforward_layernorm"))
    for i in range(len(spec.layers)):
        norm = ("post_attention_layernorm", "post_feedforward_layernorm")[i % 2]
        names[f"model.layers.{i // 2}.{norm}.weight"] = WeightPart(f"layers.{i}.output_norm")
    return norms_less_one(names)


_GPT_OSS_EXPERTS = ExpertNames(router="router.weight", other_up=(), other_down=())
_TRANSPOSED = ("up_proj", "down_proj")
"""Expert weights are stored transposed in bfloat16, but not in MXFP4. Gate and up rows alternate in both."""


def _gpt_oss(fields: ConfigFields) -> ModelSpec:
    """Attention with sinks and a sliding window in every other layer, then experts with biases."""
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.raw(name) not in (None, value):
            refuse(name, fields.raw(name), f"{value}: another activation is not supported")
    attention = fields.attention(sinks=True)
    experts = fields.experts(RouterSpec(bias=True), LOCAL_FIELDS, bias=True, activation="clamped_swiglu")
    return fields.model(fields.windows(attention), experts)


def _gpt_oss_names(spec: ModelSpec) -> Names:
    named: Names = {}
    for name, part in weight_names(spec, mixers={ExpertsLayer: _GPT_OSS_EXPERTS}).items():
        own = part.target.rpartition(".")[2]
        if own in ("up_proj", "up_bias"):
            part = replace(part, axis=1, pieces=((0, 1), (1, 2)))
        if own in _TRANSPOSED:
            part = replace(part, transposed=True, instead={f"{name}_blocks": part})
        named[name] = part
    return named


_GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _gemma3,
    _gemma3_names,
    other_prefixes=(
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
    ),
    kinds=WINDOW_KINDS,
)
FAMILIES = (
    _GEMMA3,
    replace(_GEMMA3, model_type="gemma3", architecture="Gemma3ForConditionalGeneration", inside="text_config"),
    Family("gpt_oss", "GptOssForCausalLM", _gpt_oss, _gpt_oss_names, kinds=WINDOW_KINDS),
    Family("granite", "GraniteForCausalLM", _granite, weight_names),
    Family("llama", "LlamaForCausalLM", _llama, weight_names, plain=INERT.union(_READ.split())),
    Family("mistral", "MistralForCausalLM", _mistral, weight_names),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _olmo3,
        partial(
            weight_names,
            mlp=Called("mlp", "post_feedforward_layernorm"),
            mixers={AttentionLayer: Called("self_attn", "post_attention_layernorm")},
        ),
        kinds=WINDOW_KINDS,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        partial(
            weight_names,
            mlp=Called("mlp", "post_attention_layernorm", whole(up="gate_up_proj", down="down_proj")),
            mixers={AttentionLayer: Called("self_attn", "input_layernorm", whole(qkv="qkv_proj", o="o_proj"))},
        ),
    ),
    Family("qwen2", "Qwen2ForCausalLM", _qwen2, weight_names, kinds=WINDOW_KINDS),
    Family("qwen3", "Qwen3ForCausalLM", _qwen3, weight_names, kinds=WINDOW_KINDS),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, weight_names),
    Family("smollm3", "SmolLM3ForCausalLM", _smollm3, weight_names, kinds=WINDOW_KINDS),
)
