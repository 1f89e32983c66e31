"""Qwen3.5: gated delta nets or gated attention, then a gated MLP or experts; also as the text model of larger files."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.delta import joined_names, read_gated_delta
from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, Names, OwnNames, norms_less_one, weight_names
from bateleur.runner.models.spec import DeltaLayer, Layer, MlpLayer, ModelSpec

_MIXERS = {**MIXERS, DeltaLayer: OwnNames(("linear_attn", "input_layernorm"), joined_names)}
KINDS = ("linear_attention", "full_attention")
NEEDS = ("layer_types", "full_attention_interval")


def gated_attention(fields: ConfigFields) -> Layer:
    """Attention with an output gate, norms of queries and keys, and a rotary embedding of some lanes."""
    if fields.raw("attn_output_gate") is False:
        raise ValueError("attn_output_gate is False; supported is True")
    return fields.attention(
        rope=fields.rope(partial=True),
        bias=fields["attention_bias"],
        qk_norm_eps=fields["rms_norm_eps"],
        gated=True,
    )


def read_blocks(fields: ConfigFields, *behind: Layer) -> tuple[Layer, ...]:
    """A gated delta net or gated attention, as `layer_types` says, each with what is `behind` it."""
    fields.choice("hidden_act", ("silu",))
    readers = {
        "linear_attention": lambda: read_gated_delta(fields, fields["rms_norm_eps"]),
        "full_attention": lambda: gated_attention(fields),
    }
    return read_layers("layer_types[{i}] is {kind!r}", fields.raw("layer_types") or (), readers, *behind)


def _read_dense(architecture: str, fields: ConfigFields) -> ModelSpec:
    layers = read_blocks(fields, MlpLayer(fields["intermediate_size"]))
    return fields.model(architecture, layers, branches_per_layer=2)


def _names(spec: ModelSpec) -> Names:
    return norms_less_one(weight_names(spec, ("mlp", "post_attention_layernorm"), _MIXERS))


DENSE = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    partial(_read_dense, "Qwen3_5ForCausalLM"),
    _names,
    other_prefixes=(("model.language_model.", "model."),),
    kinds=KINDS,
    needs=NEEDS,
)
DENSE_INSIDE = Family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    partial(_read_dense, "Qwen3_5ForConditionalGeneration"),
    _names,
    other_prefixes=(("model.language_model.", "model."),),
    inside="text_config",
    skips=("model.visual.",),
    kinds=KINDS,
    needs=NEEDS,
)
