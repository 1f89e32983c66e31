"""NemotronH: one branch per layer (Mamba-2, attention without rotary embedding, or an ungated MLP)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bateleur.mamba import MambaSpec
from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names, Part, attention_names, mamba_names, mlp_names
from bateleur.runner.models.spec import AttentionLayer, Layer, MambaLayer, MlpLayer, ModelSpec

_SSM_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _mamba(fields: ConfigFields) -> MambaLayer:
    fields.choice("mamba_hidden_act", ("silu",))
    fields.divides("n_groups", "mamba_num_heads")
    ssm_dtype = _SSM_DTYPES[fields.choice("mamba_ssm_cache_dtype", tuple(_SSM_DTYPES))]
    state = MambaSpec(
        num_heads=fields.size("mamba_num_heads"),
        head_dim=fields.size("mamba_head_dim"),
        state_size=fields.size("ssm_state_size"),
        num_groups=fields.size("n_groups"),
        conv_width=fields.size("conv_kernel"),
        ssm_dtype=ssm_dtype,
    )
    # transformers clamps dt to (time_step_min, inf) here and leaves `time_step_limit` unread; logits agree with it.
    dt_min = fields.number("time_step_min")
    return MambaLayer(
        state=state,
        chunk_size=fields.size("chunk_size"),
        dt_min=dt_min,
        dt_max=math.inf,
        conv_bias=fields.flag("use_conv_bias"),
        proj_bias=fields.flag("use_bias"),
        norm_eps=fields.number("layer_norm_epsilon"),
    )


def _mlp(fields: ConfigFields) -> MlpLayer:
    activation = fields.choice("mlp_hidden_act", ("relu2", "silu"))
    return MlpLayer(
        intermediate_size=fields.size("intermediate_size"),
        activation="relu2" if activation == "relu2" else "silu",
        gated=False,
        bias=fields.flag("mlp_bias"),
    )


def _attention(fields: ConfigFields) -> AttentionLayer:
    # `attention_bias` and `sliding_window` exist in the configuration, and no version of the model reads them.
    return fields.attention(scale=fields.head_dim() ** -0.5, rope=None, bias=False)


_KINDS: dict[str, Callable[[ConfigFields], Layer]] = {
    "linear_attention": _mamba,
    "full_attention": _attention,
    "mlp": _mlp,
}


def _read_spec(fields: ConfigFields) -> ModelSpec:
    kinds = fields.raw("layers_block_type")
    made: dict[str, Layer] = {}
    for i, kind in enumerate(kinds):
        if kind not in _KINDS:
            what = "a mixture of experts, which is not supported" if kind == "moe" else "unknown"
            raise ValueError(f"layers_block_type[{i}] is {kind!r}, {what}; supported are {', '.join(_KINDS)}")
        if kind not in made:
            made[kind] = _KINDS[kind](fields)
    return ModelSpec(
        architecture=FAMILY.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        layers=tuple(made[kind] for kind in kinds),
        norm_eps=fields.number("layer_norm_epsilon"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        eos_token_ids=fields.eos_token_ids(),
        residual_in_fp32=fields.flag("residual_in_fp32"),
    )


def _names(spec: ModelSpec) -> Names:
    names: Names = {
        "backbone.embeddings.weight": Part("embedding"),
        "backbone.norm_f.weight": Part("final_norm"),
        "lm_head.weight": Part("lm_head"),
    }
    for i, layer in enumerate(spec.layers):
        source, target = f"backbone.layers.{i}", f"layers.{i}"
        names[f"{source}.norm.weight"] = Part(f"{target}.input_norm")
        match layer:
            case AttentionLayer():
                names.update(attention_names(f"{source}.mixer", target, layer))
            case MambaLayer():
                names.update(mamba_names(f"{source}.mixer", target, layer))
            case MlpLayer():
                names.update(mlp_names(f"{source}.mixer", target, layer))
    return names


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _read_spec,
    _names,
    other_prefixes=(("model.", "backbone."),),
    needs=("layers_block_type", "hybrid_override_pattern"),
)
