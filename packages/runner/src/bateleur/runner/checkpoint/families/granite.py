"""Granite: Llama with multipliers of embeddings, scores, branches and logits."""

from __future__ import annotations

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.llama import gated_mlp, llama_names
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    rope, bias, scale = fields.rope(partial=False), fields["attention_bias"], fields["attention_multiplier"]
    attention = fields.attention(rope=rope, bias=bias, scale=scale)
    return fields.model(
        FAMILY.architecture,
        (attention, gated_mlp(fields)) * fields["num_hidden_layers"],
        branches_per_layer=2,
        embedding_multiplier=fields["embedding_multiplier"],
        residual_multiplier=fields["residual_multiplier"],
        logits_divisor=fields["logits_scaling"],
    )


FAMILY = Family("granite", "GraniteForCausalLM", _read_spec, llama_names, needs=("num_hidden_layers",))
