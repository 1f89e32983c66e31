"""GraniteMoeHybrid: Mamba-2 or attention, then a gated MLP, optionally with experts, and four multipliers."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.experts import read_experts
from bateleur.runner.checkpoint.families.base import Family, read_layers
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import MIXERS, ExpertNames, weight_names
from bateleur.runner.models.spec import ExpertsLayer, Layer, MlpLayer, ModelSpec, RouterSpec

_MOE = "block_sparse_moe"
_EXPERTS = ExpertNames(
    router=f"{_MOE}.router.layer.weight",
    other_router=(f"{_MOE}.router.weight",),
    up=f"{_MOE}.input_linear.weight",
    other_up=(f"{_MOE}.experts.gate_up_proj",),
    down=f"{_MOE}.output_linear.weight",
    other_down=(f"{_MOE}.experts.down_proj",),
    shared="shared_mlp",
)
_EXPERT_FIELDS = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_size": "intermediate_size",
}


def _read_spec(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    shared = MlpLayer(fields["shared_intermediate_size"])
    mlp: Layer = shared
    if fields["num_local_experts"]:
        mlp = read_experts(fields, RouterSpec(), _EXPERT_FIELDS, shared=shared)

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
    partial(
        weight_names,
        mlp=("shared_mlp", "post_attention_layernorm"),
        fused_mlp=True,
        mixers={**MIXERS, ExpertsLayer: _EXPERTS},
    ),
    needs=("layer_types", "layers_block_type"),
)
