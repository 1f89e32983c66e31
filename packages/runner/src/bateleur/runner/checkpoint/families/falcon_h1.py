"""Falcon-H1: parallel attention and Mamba-2 in every layer, then a gated MLP, with multipliers.

Multipliers take no time in a step: they are folded into existing factors, into `scale`, or into weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names, weight_names
from bateleur.runner.models.spec import GatedNorm, MlpLayer, ModelSpec, ParallelLayer


def _read_spec(fields: ConfigFields) -> ModelSpec:
    fields.choice("hidden_act", ("silu",))
    if fields["projectors_bias"] != fields["mamba_proj_bias"]:
        raise ValueError(
            f"projectors_bias is {fields['projectors_bias']}; it must equal mamba_proj_bias = "
            f"{fields['mamba_proj_bias']}"
        )
    norm: GatedNorm = "norm first" if fields["mamba_norm_before_gate"] else "gate first"
    mamba = replace(fields.mamba(), norm=norm if fields["mamba_rms_norm"] else "gate only")
    # Queries, keys and values are linear in the input: its multiplier applies twice to scores and once to outputs.
    inward = fields["attention_in_multiplier"]
    scale = fields.head_dim() ** -0.5 * fields["key_multiplier"] * inward**2
    attention = fields.attention(rope=fields.rope(partial=False), bias=fields["attention_bias"], scale=scale)
    outward = (fields["ssm_out_multiplier"], fields["attention_out_multiplier"] * inward)
    mlp = MlpLayer(fields["intermediate_size"], bias=fields["mlp_bias"])
    down = fields["mlp_multipliers"][1]
    layers = (ParallelLayer((mamba, attention), outward), ParallelLayer((mlp,), (down,)))
    return fields.model(
        FAMILY.architecture,
        layers * fields["num_hidden_layers"],
        branches_per_layer=2,
        embedding_multiplier=fields["embedding_multiplier"],
        logits_divisor=1.0 / fields["lm_head_multiplier"],
    )


def _fold(fields: ConfigFields, names: Names) -> Names:
    """Fold the multipliers before nonlinear functions into weights: of the MLP's gate, and of the inputs of Mamba."""
    groups, heads = fields["mamba_n_groups"] * fields["mamba_d_state"], fields["mamba_n_heads"]
    inner, inward = heads * fields["mamba_d_head"], fields["ssm_in_multiplier"]
    rows = (inner, inner, groups, groups, heads)
    biases = tuple(zip(rows, fields["ssm_multipliers"], strict=True))
    factors = {
        "mamba.in_proj.weight": tuple((count, inward * factor) for count, factor in biases),
        "mamba.in_proj.bias": biases,
        "feed_forward.gate_proj.weight": ((None, fields["mlp_multipliers"][0]),),
        "feed_forward.gate_proj.bias": ((None, fields["mlp_multipliers"][0]),),
    }
    # Input multipliers of attention apply to biases here, but not in the file.
    factors |= {f"self_attn.{name}_proj.bias": ((None, 1.0 / fields["attention_in_multiplier"]),) for name in "qkvo"}
    scaled = {name: factors.get(".".join(name.rsplit(".", 3)[1:]), ()) for name in names}
    return {name: replace(part, factors=scaled[name]) for name, part in names.items()}


FAMILY = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    _read_spec,
    partial(weight_names, mlp=("feed_forward", "pre_ff_layernorm"), final_norm="final_layernorm"),
    fold=_fold,
    needs=("num_hidden_layers",),
)
