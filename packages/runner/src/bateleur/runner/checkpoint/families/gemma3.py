"""Gemma 3: attention with a sliding window in most layers, then a gated MLP; norms before and after each."""

from __future__ import annotations

from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, read_windows
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names, Part, norms_less_one, weight_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec, ParallelLayer
from bateleur.runner.utils.arguments import refuse


def _family(model_type: str, architecture: str, inside: str | None = None) -> Family:
    def read(fields: ConfigFields) -> ModelSpec:
        return _read_spec(fields, architecture)

    return Family(
        model_type,
        architecture,
        read,
        _names,
        other_prefixes=(
            ("language_model.lm_head.", "lm_head."),
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
        ),
        inside=inside,
        kinds=WINDOW_KINDS,
        needs=("num_hidden_layers",),
    )


def _read_spec(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",))
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.raw(name):
            refuse(name, fields.raw(name), "null or false: other values are not supported")
    attention = fields.attention(
        rope=fields.rope(partial=False, layer_type="full_attention"),
        bias=fields["attention_bias"],
        scale=fields["query_pre_attn_scalar"] ** -0.5,
        qk_norm_eps=fields["rms_norm_eps"],
    )
    blocks = read_windows(fields, attention, rope=fields.rope(partial=False, layer_type="sliding_attention"))
    mlp = MlpLayer(fields["intermediate_size"], "gelu_tanh")
    return fields.model(
        architecture,
        tuple(ParallelLayer((part,), (1.0,), output_norm=True) for block in blocks for part in (block, mlp)),
        branches_per_layer=2,
        embedding_multiplier=fields["hidden_size"] ** 0.5,
        rounds_multiplier=True,
        exact_norms=True,
    )


def _names(spec: ModelSpec) -> Names:
    names = weight_names(spec, ("mlp", "pre_feedforward_layernorm"))
    for i in range(len(spec.layers)):
        norm = ("post_attention_layernorm", "post_feedforward_layernorm")[i % 2]
        names[f"model.layers.{i // 2}.{norm}.weight"] = Part(f"layers.{i}.output_norm")
    return norms_less_one(names)


TEXT = _family("gemma3_text", "Gemma3ForCausalLM")
INSIDE = _family("gemma3", "Gemma3ForConditionalGeneration", "text_config")
