"""Checks of configuration fields, common to all model families."""

import math
from collections.abc import Mapping
from typing import Any

from bateleur.runner.utils.arguments import Check, Integer, Number, OneOf, Several, flag, refuse, shown, text

ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "dynamic": ("factor",),
}
"""Supported values of `rope_type`, and their required fields."""

_TOKEN_ID = Integer(0, rule="a token id or a list of them")
_TOKEN_IDS = Several(_TOKEN_ID, "a token id or a list of them")
_POSITIVE = Number(0, above=True)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Check a field that holds no, one or several token ids, and return them."""
    if value is None:
        return ()
    return _TOKEN_IDS(name, value) if isinstance(value, list | tuple) else (_TOKEN_ID(name, value),)


def limits_of_dt(name: str, value: Any) -> tuple[float, float]:
    """Check the field with bounds of dt (Mamba-2 time step), and return them. The upper bound may be infinite."""
    low, high = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 <= low <= high:
        refuse(name, value, "two numbers with 0 <= low <= high")
    return float(low), float(high)


def _numbers(count: int) -> Check:
    def check(name: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, list | tuple) or len(value) != count:
            refuse(name, value, f"a list of {count} numbers")
        return tuple(Number()(f"{name}[{i}]", each) for i, each in enumerate(value))

    return check


def _pattern(name: str, value: Any) -> str:
    if not isinstance(value, str) or not set(value) <= set("M*-E"):
        refuse(name, value, "letters of M*-E")
    return value


# More than any model has of each: what goes beyond is a damaged file, and would be a matter of all memory.
_SIZE = Integer(1, 1 << 24)
_MOST_LAYERS = 1024
# Models without experts write zeros; who reads experts wants more.
_EXPERTS = Integer(0, 4096)
# Kinds of layers under their names of all times; a family says which of them it has.
_KIND = OneOf(("attention", "conv", "full_attention", "linear_attention", "mamba", "mlp", "moe", "sliding_attention"))
_LENGTH = Integer(1, (1 << 31) - 1)
_LAYERS = Several(Integer(0), "a list of layers")
_RULES: tuple[tuple[str, Check], ...] = (
    # Sizes
    (
        "vocab_size hidden_size intermediate_size shared_intermediate_size num_attention_heads num_key_value_heads "
        "head_dim mamba_num_heads mamba_head_dim ssm_state_size state_size n_groups mamba_n_heads mamba_d_ssm "
        "mamba_d_state mamba_n_groups linear_num_key_heads linear_num_value_heads linear_key_head_dim "
        "linear_value_head_dim linear_num_heads linear_head_dim num_heads kv_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim block_multiple_of block_ff_dim moe_shared_expert_intermediate_size "
        "moe_latent_size shared_expert_intermediate_size",
        _SIZE,
    ),
    ("mamba_d_head", lambda name, value: value if value == "auto" else _SIZE(name, value)),
    ("moe_intermediate_size", Integer(0, 1 << 24)),
    ("conv_kernel mamba_d_conv linear_conv_kernel_dim short_conv_kernel_size conv_L_cache", Integer(2, 1 << 16)),
    ("chunk_size mamba_chunk_size", Integer(1, 1024)),
    ("sliding_window max_position_embeddings model_max_length original_max_position_embeddings", _LENGTH),
    ("max_window_layers", Integer(0, (1 << 31) - 1)),
    # Layers
    ("num_hidden_layers full_attention_interval decoder_sparse_step", Integer(1, _MOST_LAYERS)),
    ("num_dense_layers mtp_num_hidden_layers num_nextn_predict_layers", Integer(0, _MOST_LAYERS)),
    ("mlp_only_layers attn_layer_indices full_attn_idxs", _LAYERS),
    ("full_attn_layers kda_layers", Several(Integer(1), "a list of layers")),
    ("no_rope_layers", Several(Integer(0, 1), "a list of 0 and 1")),
    ("mlp_layer_types", Several(OneOf(("dense", "sparse")), "a list of names")),
    ("layers_block_type mtp_layers_block_type layer_types", Several(_KIND, "a list of names")),
    ("hybrid_override_pattern", _pattern),
    # Experts
    ("num_experts_per_token num_shared_experts num_expert_group", Integer(1, 4096)),
    ("num_local_experts n_routed_experts num_experts num_experts_per_tok n_group topk_group", _EXPERTS),
    # Factors and limits
    (
        "attention_in_multiplier lm_head_multiplier "  # something is divided by them
        "layer_norm_epsilon rms_norm_eps norm_eps logits_scaling routed_scaling_factor query_pre_attn_scalar "
        "rope_theta partial_rotary_factor attention_factor beta_fast beta_slow low_freq_factor high_freq_factor",
        _POSITIVE,
    ),
    ("mamba_expand expand block_ffn_dim_multiplier", Number(0, 1024, above=True)),
    ("embedding_multiplier residual_multiplier attention_multiplier", Number()),
    ("key_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier", Number()),
    ("mlp_multipliers", _numbers(2)),
    ("ssm_multipliers", _numbers(5)),
    ("time_step_min attention_dropout hidden_dropout initializer_range", Number(0)),
    ("time_step_limit", limits_of_dt),
    ("factor", Number(1)),
    ("short_factor long_factor", Several(_POSITIVE, "a list of numbers > 0")),
    # Flags and names
    (
        "conv_bias block_auto_adjust_ff_dim tie_embedding use_sliding_window norm_topk_prob moe_renormalize "
        "use_expert_bias use_cache attention_bias mlp_bias use_bias use_conv_bias mamba_conv_bias mamba_proj_bias "
        "attn_output_gate linear_allow_neg_eigval use_bidirectional_attention projectors_bias mamba_rms_norm "
        "mamba_norm_before_gate tie_word_embeddings residual_in_fp32 mtp_use_dedicated_embeddings",
        flag,
    ),
    (
        "scoring_func moe_router_activation_func hidden_act mamba_hidden_act mlp_hidden_act mamba_ssm_cache_dtype "
        "model_type position_embedding_type rope_type type",
        text,
    ),
    ("architectures", Several(text, "a list of names")),
    ("dtype torch_dtype", OneOf(("auto", "float64", "float32", "bfloat16", "float16"))),
    # Tokens. Nobody reads the last two, but transformers makes as many names as there are labels.
    ("image_token_id image_token_index video_token_id bos_token_id", _TOKEN_ID),
    ("eos_token_id", token_ids),
    ("pad_token_id", Integer(-1)),
    ("num_labels", Integer(0, 1 << 16)),
)
CHECKS = {name: check for names, check in _RULES for name in names.split()}
"""Checks of fields by name, for all families; fields of rotary embedding may be in their own object."""


_NESTED = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "linear_attn_config")
"""Nested objects whose fields are checked too. Rotary parameters may hold one object per layer type."""


def check_fields(config: Mapping[str, Any]) -> None:
    """Check known fields of a configuration file. Raises ValueError for an invalid one; null and absent are valid."""
    for name in _NESTED:
        nested = config.get(name)
        if nested is not None:
            if not isinstance(nested, dict):
                refuse(name, nested, "an object")
            check_fields(nested)
            for need in ROPE_NEEDS.get(str(nested.get("rope_type", nested.get("type"))), ()):
                CHECKS[need](need, nested.get(need))
    for name, value in config.items():
        if value is not None and name in CHECKS:
            CHECKS[name](name, _plain(value))
    _check_together(config)


def _check_together(config: Mapping[str, Any]) -> None:
    layers: Any = config.get("num_hidden_layers")
    numbered: Any = config.get("linear_attn_config") or {}
    names = [name for name in ("full_attn_layers", "kda_layers") if numbered.get(name)]
    if layers is not None and names:
        held = sorted(layer for name in names for layer in numbered[name])
        if held != list(range(1, layers + 1)):
            raise ValueError(
                f"{' and '.join(names)} of linear_attn_config hold {shown(held)}; they must hold each layer from 1 to "
                f"num_hidden_layers = {layers} once"
            )
    for name in ("layers_block_type", "layer_types", "mlp_layer_types", "hybrid_override_pattern"):
        count = len(config.get(name) or ())
        if count > _MOST_LAYERS:
            raise ValueError(f"{name} has {count} entries; it must have at most {_MOST_LAYERS}")
        if name.endswith("layer_types") and count and layers is not None and count != layers:
            raise ValueError(f"{name} has {count} entries; it must have num_hidden_layers = {layers}")
    inner = _product(config, "mamba_n_heads", "mamba_d_head")
    named = "mamba_d_ssm" if config.get("mamba_d_ssm") is not None else "mamba_expand * hidden_size"
    wanted = _product(config, *named.split(" * "))
    if inner is not None and wanted is not None and inner != wanted:
        raise ValueError(f"mamba_n_heads * mamba_d_head is {inner}; it must equal {named} = {wanted}")


def _product(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the product of these fields; None if one of them is not a number."""
    sizes: list[Any] = [config.get(name) for name in names]
    return int(math.prod(sizes)) if all(isinstance(size, int | float) for size in sizes) else None


def _plain(value: Any) -> Any:
    """Return a value of the file, with transformers' notation of infinity and NaN converted to floats."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    written = value.get("__float__") if isinstance(value, dict) else None
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else value
