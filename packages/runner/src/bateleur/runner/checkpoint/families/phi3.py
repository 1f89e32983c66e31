"""Phi-3 and Phi-4: Llama in fused matrices, with partly rotary embedding and one sliding window or none."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.llama import gated_mlp
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, Names, OwnNames, Part, weight_names
from bateleur.runner.models.spec import AttentionLayer, MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    window = None if fields.raw("sliding_window") is None else fields["sliding_window"]
    attention = fields.attention(rope=fields.rope(partial=True), bias=False, sliding_window=window)
    layers = (attention, gated_mlp(fields)) * fields["num_hidden_layers"]
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


def _attention_names(_: AttentionLayer) -> Names:
    return {"qkv_proj.weight": Part("qkv_proj"), "o_proj.weight": Part("o_proj")}


def _mlp_names(_: MlpLayer) -> Names:
    return {"gate_up_proj.weight": Part("up_proj"), "down_proj.weight": Part("down_proj")}


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read_spec,
    partial(
        weight_names,
        mlp=OwnNames(("mlp", "post_attention_layernorm"), _mlp_names),
        mixers={**MIXERS, AttentionLayer: OwnNames(("self_attn", "input_layernorm"), _attention_names)},
    ),
    needs=("num_hidden_layers",),
)
