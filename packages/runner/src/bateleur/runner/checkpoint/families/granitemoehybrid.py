"""GraniteMoeHybrid without experts: a Mamba-2 mixer or attention, then the shared gated MLP, with four multipliers."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import weight_names
from bateleur.runner.models.spec import Layer, MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    if experts := fields.raw("num_local_experts"):
        raise ValueError(
            f"num_local_experts is {experts}; a mixture of experts is not supported, it must be 0"
        )
    fields.choice("hidden_act", ("silu",))
    mlp = MlpLayer(fields["shared_intermediate_size"])

    def attention() -> Layer:
        # Anything but "rope" means no position code at all: the Mamba layers carry the order.
        rope = fields.rope(partial=False) if fields.raw("position_embedding_type") == "rope" else None
        scale, bias = fields["attention_multiplier"], fields["attention_bias"]
        return fields.attention(rope=rope, bias=bias, scale=scale)

    readers = {"full_attention": attention, "linear_attention": fields.mamba}
    return fields.model(
        FAMILY.architecture,
        read_layers("layer type {i} is {kind!r}", fields.raw("layer_types") or (), readers, mlp),
        branches_per_layer=2,
        embedding_multiplier=fields["embedding_multiplier"],
        residual_multiplier=fields["residual_multiplier"],
        logits_divisor=fields["logits_scaling"],
    )


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _read_spec,
    partial(weight_names, mlp=("shared_mlp", "post_attention_layernorm"), fused_mlp=True),
    needs=("layer_types", "layers_block_type"),
)
