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
llama_names = partial(weight_names, mlp=("mlp", "post_attention_layernorm"))


def gated_mlp(fields: ConfigFields) -> MlpLayer:
    """Read a gated MLP from Llama's field names. Without a field `mlp_bias` there are no biases."""
    fields.choice("hidden_act", ("silu",))
    return MlpLayer(fields["intermediate_size"], bias=fields.raw("mlp_bias") is not None and fields["mlp_bias"])


def _read_spec(fields: ConfigFields) -> ModelSpec:
    attention = fields.attention(rope=fields.rope(partial=False), bias=fields["attention_bias"])
    layers = (attention, gated_mlp(fields)) * fields["num_hidden_layers"]
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family(
    "llama", "LlamaForCausalLM", _read_spec, llama_names, plain=INERT.union(_READ.split()), needs=("num_hidden_layers",)
)
