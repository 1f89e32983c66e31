"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and a sliding window in some layers."""

from __future__ import annotations

from dataclasses import replace

from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, followed, read_windows
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    attention = replace(fields.attention(rope=fields.rope(partial=False), bias=True), o_bias=False)
    layers = followed(read_windows(fields, attention), gated_mlp(fields))
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _read_spec, llama_names, kinds=WINDOW_KINDS, needs=("num_hidden_layers",))
