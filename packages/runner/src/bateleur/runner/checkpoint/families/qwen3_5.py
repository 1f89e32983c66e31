"""Qwen3.5: gated delta nets or gated attention, then a gated MLP or experts; also the text part of multimodal files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bateleur.runner.checkpoint.delta import joined_names, read_gated_delta
from bateleur.runner.checkpoint.experts import read_experts
from bateleur.runner.checkpoint.families.base import Family, MtpNames, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, Names, OwnNames, norms_less_one, weight_names
from bateleur.runner.models.spec import AttentionLayer, DeltaLayer, ExpertsLayer, Layer, MlpLayer, ModelSpec, RouterSpec
from bateleur.runner.utils.arguments import refuse

KINDS = ("linear_attention", "full_attention")
NEEDS = ("layer_types", "full_attention_interval")


def gated_attention(fields: ConfigFields) -> Layer:
    """Read attention with an output gate, norms of queries and keys, and partial rotary embedding."""
    if fields.raw("attn_output_gate") is False:
        raise ValueError("attn_output_gate is False; supported is True")
    return fields.attention(
        rope=fields.rope(partial=True), bias=fields["attention_bias"], qk_norm_eps=fields["rms_norm_eps"], gated=True
    )


def read_blocks(fields: ConfigFields, *following: Layer) -> tuple[Layer, ...]:
    """Read the mixer of each entry of `layer_types`: a gated delta net or gated attention.

    `following` comes after each.
    """
    fields.choice("hidden_act", ("silu",))
    readers = {
        "linear_attention": lambda: read_gated_delta(fields, fields["rms_norm_eps"]),
        "full_attention": lambda: gated_attention(fields),
    }
    return read_layers("layer_types[{i}] is {kind!r}", fields.raw("layer_types") or (), readers, *following)


def read_qwen_experts(fields: ConfigFields, *, normalised: bool = True) -> ExpertsLayer:
    """Read experts with a softmax router, and a shared expert with a gate."""
    shared = MlpLayer(fields["shared_expert_intermediate_size"])
    return read_experts(fields, RouterSpec(normalised=normalised), shared=shared, shared_gate=True)


def qwen_names(delta: Callable[[DeltaLayer], Names], spec: ModelSpec) -> Names:
    """Return the weight names of a decoder. delta: returns the names of a delta layer."""
    mixers = {**MIXERS, DeltaLayer: OwnNames(("linear_attn", "input_layernorm"), delta)}
    return norms_less_one(weight_names(spec, ("mlp", "post_attention_layernorm"), mixers))


def _mtp_layers(fields: ConfigFields, spec: ModelSpec) -> tuple[tuple[Layer, ...], int]:
    """Return the layers of an MTP head: one like the target's last layer with attention.

    Files of Qwen3-Next do not have the number of the head's layers.
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


MTP = MtpNames(
    layers=_mtp_layers, token_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden", fc="fc", final_norm="norm"
)


def _family(model_type: str, architecture: str, *, experts: bool, inside: str | None = None) -> Family:
    def read(fields: ConfigFields) -> ModelSpec:
        mlp = read_qwen_experts(fields) if experts else MlpLayer(fields["intermediate_size"])
        return fields.model(architecture, read_blocks(fields, mlp), branches_per_layer=2, exact_norms=True)

    return Family(
        model_type,
        architecture,
        read,
        partial(qwen_names, joined_names),
        other_prefixes=(("model.language_model.", "model."),),
        inside=inside,
        kinds=KINDS,
        mtp=MTP,
        needs=NEEDS,
    )


INSIDE = "text_config"
DENSE = _family("qwen3_5_text", "Qwen3_5ForCausalLM", experts=False)
EXPERTS = _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", experts=True)
DENSE_INSIDE = _family("qwen3_5", "Qwen3_5ForConditionalGeneration", experts=False, inside=INSIDE)
EXPERTS_INSIDE = _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", experts=True, inside=INSIDE)
