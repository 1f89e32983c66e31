"""GraniteMoeHybrid without experts: a Mamba-2 mixer or attention, then the shared gated MLP, with four multipliers."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.two_branch import interleave, read_mamba
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names, Part, two_branch_names
from bateleur.runner.models.spec import MlpLayer, ModelSpec


def _read_spec(fields: ConfigFields) -> ModelSpec:
    experts = fields.raw("num_local_experts") or 0
    if experts:
        raise ValueError(
            f"num_local_experts is {experts}; a mixture of experts is not supported, it must be 0"
        )
    fields.choice("hidden_act", ("silu",))
    kinds = fields.raw("layer_types")
    attention = mamba = None
    if "full_attention" in kinds:
        # Anything but "rope" means no position code at all: the Mamba layers carry the order.
        rope = fields.rope(partial=False) if fields.raw("position_embedding_type") == "rope" else None
        scale = fields.number("attention_multiplier")
        attention = fields.attention(scale=scale, rope=rope, bias=fields.flag("attention_bias"))
    if "linear_attention" in kinds:
        mamba = read_mamba(fields)
    mlp = MlpLayer(fields.size("shared_intermediate_size"), "silu", gated=True, bias=False)
    return ModelSpec(
        architecture=FAMILY.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        branches_per_layer=2,
        layers=interleave(fields, kinds, attention, mamba, mlp),
        norm_eps=fields.number("rms_norm_eps"),
        embedding_multiplier=fields.number("embedding_multiplier"),
        residual_multiplier=fields.number("residual_multiplier"),
        logits_divisor=fields.number("logits_scaling"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        eos_token_ids=fields.eos_token_ids(),
    )


def _fused_mlp_names(source: str, target: str, layer: MlpLayer) -> Names:
    """Gate and up are one tensor in the checkpoint, the gate in front, as in ours."""
    return {
        f"{source}.input_linear.weight": Part(f"{target}.up_proj"),
        f"{source}.output_linear.weight": Part(f"{target}.down_proj"),
    }


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _read_spec,
    partial(
        two_branch_names,
        mlp="shared_mlp",
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
        read_mlp=_fused_mlp_names,
    ),
    needs=("layer_types", "layers_block_type"),
)
