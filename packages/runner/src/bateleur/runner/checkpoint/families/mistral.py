"""Mistral: Llama, with one sliding window in all layers or none."""

from __future__ import annotations

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    window = None if fields.raw("sliding_window") is None else fields["sliding_window"]
    attention = fields.attention(rope=fields.rope(partial=False), bias=False, sliding_window=window)
    layers = (attention, gated_mlp(fields)) * fields["num_hidden_layers"]
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family("mistral", "MistralForCausalLM", _read_spec, llama_names, needs=("num_hidden_layers",))
