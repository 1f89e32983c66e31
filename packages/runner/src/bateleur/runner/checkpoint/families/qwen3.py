"""Qwen3: Llama with norms of queries and keys, and a sliding window in some layers."""

from __future__ import annotations

from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, followed, read_windows
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import AttentionLayer, ModelSpec


def qwen3_attention(fields: ConfigFields) -> AttentionLayer:
    """Read attention with RMS norms over each head of queries and keys."""
    rope, bias = fields.rope(partial=False), fields["attention_bias"]
    return fields.attention(rope=rope, bias=bias, qk_norm_eps=fields["rms_norm_eps"])


def _read_spec(fields: ConfigFields) -> ModelSpec:
    layers = followed(read_windows(fields, qwen3_attention(fields)), gated_mlp(fields))
    return fields.model(FAMILY.architecture, layers, branches_per_layer=2)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _read_spec, llama_names, kinds=WINDOW_KINDS, needs=("num_hidden_layers",))
