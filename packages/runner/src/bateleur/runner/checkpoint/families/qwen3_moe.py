"""Qwen3-MoE: Qwen3's attention, then experts or a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from bateleur.runner.checkpoint.experts import read_experts, sparse_layers
from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.families.qwen3 import qwen3_attention
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec, RouterSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    window = None if fields.raw("sliding_window") is None else fields["sliding_window"]
    attention = replace(qwen3_attention(fields), sliding_window=window)
    experts = read_experts(fields, RouterSpec(normalised=fields["norm_topk_prob"]))
    layers = sparse_layers(fields, (attention,) * fields["num_hidden_layers"], gated_mlp(fields), experts)
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_spec, llama_names, needs=("num_hidden_layers",))
