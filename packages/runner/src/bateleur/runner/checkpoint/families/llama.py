"""Llama: attention with rotary embedding, then a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import weight_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    attention = fields.attention(rope=fields.rope(partial=False), bias=fields["attention_bias"])
    mlp = MlpLayer(fields["intermediate_size"], bias=fields["mlp_bias"])
    layers = (attention, mlp) * fields["num_hidden_layers"]
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    _read_spec,
    partial(weight_names, mlp=("mlp", "post_attention_layernorm")),
    needs=("num_hidden_layers",),
)
