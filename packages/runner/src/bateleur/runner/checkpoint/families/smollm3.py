"""SmolLM3: Llama with layers without positions, which may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from bateleur.runner.checkpoint.families.base import WINDOW_KINDS, Family, followed, read_windows
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    attention = fields.attention(rope=fields.rope(partial=False), bias=fields["attention_bias"])
    blocks, rotary = read_windows(fields, attention), fields["no_rope_layers"]
    if len(rotary) < len(blocks):
        raise ValueError(f"no_rope_layers has {len(rotary)} entries; it must have num_hidden_layers = {len(blocks)}")
    blocks = tuple(block if rotary[i] else replace(block, rope=None) for i, block in enumerate(blocks))
    return fields.model(FAMILY.architecture, followed(blocks, gated_mlp(fields)), branches_per_layer=2)


FAMILY = Family(
    "smollm3", "SmolLM3ForCausalLM", _read_spec, llama_names, kinds=WINDOW_KINDS, needs=("num_hidden_layers",)
)
