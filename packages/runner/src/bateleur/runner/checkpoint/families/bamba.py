"""Bamba: a Mamba-2 mixer or attention with partial rotary embedding, then a gated MLP."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import weight_names
from bateleur.runner.models.spec import Layer, MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    indices, num_layers = fields.raw("attn_layer_indices") or [], fields["num_hidden_layers"]
    if bad := [i for i in indices if not 0 <= i < num_layers]:
        raise ValueError(f"attn_layer_indices holds {bad[0]}; it must be in [0, num_hidden_layers = {num_layers})")
    fields.choice("hidden_act", ("silu",))
    mlp = MlpLayer(fields["intermediate_size"], bias=fields["mlp_bias"])

    def attention() -> Layer:
        return fields.attention(rope=fields.rope(partial=True), bias=fields["attention_bias"])

    kinds = ["full_attention" if i in indices else "linear_attention" for i in range(num_layers)]
    readers = {"full_attention": attention, "linear_attention": fields.mamba}
    layers = read_layers("layer type {i} is {kind!r}", kinds, readers, mlp)
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family(
    "bamba",
    "BambaForCausalLM",
    _read_spec,
    partial(weight_names, mlp=("feed_forward", "pre_ff_layernorm"), final_norm="final_layernorm"),
    needs=("num_hidden_layers",),
)
