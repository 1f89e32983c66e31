"""Llama: attention with rotary embedding, then a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import two_branch_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    bias = fields.flag("attention_bias")
    attention = fields.attention(scale=fields.head_dim() ** -0.5, rope=fields.rope(partial=False), bias=bias)
    mlp = MlpLayer(fields.size("intermediate_size"), "silu", gated=True, bias=fields.flag("mlp_bias"))
    return ModelSpec(
        architecture=FAMILY.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        branches_per_layer=2,
        layers=(attention, mlp) * fields.size("num_hidden_layers"),
        norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        eos_token_ids=fields.eos_token_ids(),
    )


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    _read_spec,
    partial(two_branch_names, mlp="mlp", mlp_norm="post_attention_layernorm", final_norm="norm"),
    needs=("num_hidden_layers",),
)
