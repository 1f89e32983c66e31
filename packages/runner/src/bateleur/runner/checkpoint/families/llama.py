"""Llama: attention with rotary embedding, then a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import INERT, Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import weight_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec

_READ = (
    "vocab_size hidden_size num_hidden_layers rms_norm_eps max_position_embeddings tie_word_embeddings eos_token_id "
    "hidden_act intermediate_size mlp_bias num_attention_heads num_key_value_heads head_dim rope_parameters"
)


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
    plain=INERT.union(_READ.split()),
    needs=("num_hidden_layers",),
)
