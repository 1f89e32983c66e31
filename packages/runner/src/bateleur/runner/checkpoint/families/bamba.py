"""Bamba: a Mamba-2 mixer or attention with partial rotary embedding, then a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.two_branch import interleave, read_mamba
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import two_branch_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    indices = fields.raw("attn_layer_indices") or []
    num_layers = fields.size("num_hidden_layers")
    bad = [i for i in indices if not 0 <= i < num_layers]
    if bad:
        raise ValueError(
            f"attn_layer_indices holds {bad[0]}; it must be in [0, num_hidden_layers = {num_layers})"
        )
    kinds = ["full_attention" if i in indices else "linear_attention" for i in range(num_layers)]
    fields.choice("hidden_act", ("silu",))
    attention = mamba = None
    if "full_attention" in kinds:
        bias = fields.flag("attention_bias")
        attention = fields.attention(
            scale=fields.head_dim() ** -0.5, rope=fields.rope(partial=True), bias=bias
        )
    if "linear_attention" in kinds:
        mamba = read_mamba(fields)
    mlp = MlpLayer(fields.size("intermediate_size"), "silu", gated=True, bias=fields.flag("mlp_bias"))
    return ModelSpec(
        architecture=FAMILY.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        branches_per_layer=2,
        layers=interleave(fields, kinds, attention, mamba, mlp),
        norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        eos_token_ids=fields.eos_token_ids(),
    )


FAMILY = Family(
    "bamba",
    "BambaForCausalLM",
    _read_spec,
    partial(two_branch_names, mlp="feed_forward", mlp_norm="pre_ff_layernorm", final_norm="final_layernorm"),
    needs=("num_hidden_layers",),
)
