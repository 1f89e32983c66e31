"""Reading a Hugging Face configuration, with errors that name the field, its value and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bateleur.mamba import Mamba2
from bateleur.runner.models.spec import (
    AttentionLayer,
    DynamicRope,
    Layer,
    LongRope,
    MambaLayer,
    ModelSpec,
    RopeSpec,
)
from bateleur.runner.utils.arguments import (
    Check,
    Integer,
    Number,
    OneOf,
    Several,
    flag,
    maybe,
    refuse,
    shown,
    text,
)

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "dynamic": ("factor",),
}
"""Supported values of `rope_type`, and the fields that they can't do without."""

_TOKEN_ID = Integer(0, rule="a token id or a list of them")
_TOKEN_IDS = Several(_TOKEN_ID, "a token id or a list of them")
_POSITIVE = Number(0, above=True)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A field that holds none, one or several."""
    if value is None:
        return ()
    return _TOKEN_IDS(name, value) if isinstance(value, list | tuple) else (_TOKEN_ID(name, value),)


def _limits(name: str, value: Any) -> tuple[float, float]:
    """Bounds on dt; the upper one may be infinite."""
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


def _head_size(name: str, value: Any) -> Any:
    return value if value == "auto" else _SIZE(name, value)


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
_KIND = OneOf(
    ("attention", "conv", "full_attention", "linear_attention", "mamba", "mlp", "moe", "sliding_attention")
)
_RULES: tuple[tuple[str, Check], ...] = (
    ("vocab_size hidden_size intermediate_size shared_intermediate_size", _SIZE),
    ("num_attention_heads num_key_value_heads head_dim", _SIZE),
    ("mamba_num_heads mamba_head_dim ssm_state_size state_size n_groups", _SIZE),
    ("mamba_n_heads mamba_d_ssm mamba_d_state mamba_n_groups", _SIZE),
    ("mamba_d_head", _head_size),
    ("linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim", _SIZE),
    ("linear_num_heads linear_head_dim num_heads", _SIZE),
    (
        "conv_kernel mamba_d_conv linear_conv_kernel_dim short_conv_kernel_size conv_L_cache",
        Integer(2, 1 << 16),
    ),
    ("kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim", _SIZE),
    ("full_attn_layers kda_layers", Several(Integer(1), "a list of layers")),
    ("mlp_layer_types", Several(OneOf(("dense", "sparse")), "a list of names")),
    ("num_experts_per_token num_shared_experts num_expert_group", Integer(1, 4096)),
    ("image_token_id image_token_index video_token_id", _TOKEN_ID),
    ("mlp_only_layers", Several(Integer(0), "a list of layers")),
    ("full_attention_interval decoder_sparse_step", Integer(1, _MOST_LAYERS)),
    ("conv_bias block_auto_adjust_ff_dim tie_embedding", flag),
    ("block_multiple_of block_ff_dim", _SIZE),
    ("block_ffn_dim_multiplier", Number(0, 1024, above=True)),
    ("num_dense_layers", Integer(0, _MOST_LAYERS)),
    ("num_hidden_layers", Integer(1, _MOST_LAYERS)),
    ("no_rope_layers", Several(Integer(0, 1), "a list of 0 and 1")),
    ("sliding_window", Integer(1, (1 << 31) - 1)),
    ("max_window_layers", Integer(0, (1 << 31) - 1)),
    ("use_sliding_window", flag),
    ("max_position_embeddings model_max_length original_max_position_embeddings", Integer(1, (1 << 31) - 1)),
    ("chunk_size mamba_chunk_size", Integer(1, 1024)),
    ("num_local_experts n_routed_experts num_experts num_experts_per_tok n_group topk_group", _EXPERTS),
    ("moe_intermediate_size", Integer(0, 1 << 24)),
    ("moe_shared_expert_intermediate_size moe_latent_size shared_expert_intermediate_size", _SIZE),
    ("norm_topk_prob moe_renormalize use_expert_bias", flag),
    ("scoring_func moe_router_activation_func", text),
    # Nobody reads these, but transformers refuses what can't be, and makes as many names as there are labels.
    ("num_labels", Integer(0, 1 << 16)),
    ("bos_token_id", _TOKEN_ID),
    ("pad_token_id", Integer(-1)),
    ("use_cache", flag),
    ("attention_dropout hidden_dropout initializer_range", Number(0)),
    ("attention_in_multiplier lm_head_multiplier", _POSITIVE),  # something is divided by them
    ("layer_norm_epsilon rms_norm_eps norm_eps logits_scaling routed_scaling_factor", _POSITIVE),
    ("query_pre_attn_scalar", _POSITIVE),
    ("mamba_expand expand", Number(0, 1024, above=True)),
    ("embedding_multiplier residual_multiplier attention_multiplier", Number()),
    ("key_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier", Number()),
    ("mlp_multipliers", _numbers(2)),
    ("ssm_multipliers", _numbers(5)),
    ("time_step_min", Number(0)),
    ("time_step_limit", _limits),
    ("attention_bias mlp_bias use_bias use_conv_bias mamba_conv_bias mamba_proj_bias", flag),
    ("attn_output_gate linear_allow_neg_eigval use_bidirectional_attention", flag),
    ("projectors_bias mamba_rms_norm mamba_norm_before_gate", flag),
    ("tie_word_embeddings residual_in_fp32", flag),
    ("hidden_act mamba_hidden_act mlp_hidden_act mamba_ssm_cache_dtype", text),
    ("mtp_use_dedicated_embeddings", flag),
    ("mtp_num_hidden_layers num_nextn_predict_layers", Integer(0, _MOST_LAYERS)),
    ("model_type position_embedding_type rope_type type", text),
    ("architectures", Several(text, "a list of names")),
    ("layers_block_type mtp_layers_block_type layer_types", Several(_KIND, "a list of names")),
    ("hybrid_override_pattern", _pattern),
    ("attn_layer_indices full_attn_idxs", Several(Integer(0), "a list of layers")),
    ("eos_token_id", token_ids),
    ("dtype torch_dtype", OneOf(("auto", "float64", "float32", "bfloat16", "float16"))),
    ("rope_theta partial_rotary_factor attention_factor", _POSITIVE),
    ("beta_fast beta_slow low_freq_factor high_freq_factor", _POSITIVE),
    ("factor", Number(1)),
    ("short_factor long_factor", Several(_POSITIVE, "a list of numbers > 0")),
)
_CHECKS = {name: check for names, check in _RULES for name in names.split()}
"""What a field may be, wherever a family has it; those of rotary embedding may stand in an object of their own."""


_NESTED = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "linear_attn_config")
"""Objects in a configuration whose fields are checked too; those of rotary embedding may hold one by kind of layer."""


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse a field of a file that can't be what it should; those that are null or absent have defaults."""
    for name in _NESTED:
        nested = config.get(name)
        if nested is not None:
            if not isinstance(nested, dict):
                refuse(name, nested, "an object")
            check_fields(nested)
            for need in _ROPE_NEEDS.get(str(nested.get("rope_type", nested.get("type"))), ()):
                _CHECKS[need](need, nested.get(need))
    for name, value in config.items():
        if value is not None and name in _CHECKS:
            _CHECKS[name](name, _plain(value))
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
    """Of fields that are numbers; None if one is not."""
    sizes: list[Any] = [config.get(name) for name in names]
    return int(math.prod(sizes)) if all(isinstance(size, int | float) for size in sizes) else None


def _plain(value: Any) -> Any:
    """A value of the file, with what JSON has no numbers for written as transformers writes it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    written = value.get("__float__") if isinstance(value, dict) else None
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else value


MAMBA_FIELDS = {
    "activation": "hidden_act",
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "state_size": "mamba_d_state",
    "num_groups": "mamba_n_groups",
    "conv_width": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
    "conv_bias": "mamba_conv_bias",
    "proj_bias": "mamba_proj_bias",
    "norm_eps": "rms_norm_eps",
}
"""What the fields of a Mamba layer are called, where nothing else is said."""


class ConfigFields:
    """A configuration object of transformers, read field by field.

    Every reader raises ValueError naming the field, its value and the rule it breaks.
    """

    def __init__(self, config: Any, written: Mapping[str, Any] | None = None) -> None:
        """written: what the file has; errors name fields as it does."""
        self.config = config
        self._written = written or {}
        self._rope_parameters: dict[str, Any] = {}
        """Those that `rope` has read."""

    def raw(self, name: str) -> Any:
        """The field as it is; None where there is none."""
        return getattr(self.config, name, None)

    def __getitem__(self, name: str) -> Any:
        """The field, of the type that its check returns."""
        return _CHECKS[name](self.called(name), self.raw(name))

    def called(self, name: str) -> str:
        """The name that the file has for a field for which transformers knows two."""
        if name not in self._written:
            for pair in getattr(self.config, "attribute_map", {}).items():
                if name in pair:
                    return next((each for each in pair if each in self._written), name)
        return name

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """One of the supported names."""
        value = self.raw(name)
        if value not in options:
            supported = ", ".join(repr(option) for option in options)
            raise ValueError(f"{name} is {value!r}; supported is {supported}")
        return str(value)

    def divides(self, part: str, whole: str) -> None:
        """Require that field `part` divides field `whole`."""
        if self[whole] % self[part]:
            named, of = self.called(part), self.called(whole)
            raise ValueError(f"{named} is {self[part]}; it must divide {of} = {self[whole]}")

    def head_dim(self) -> int:
        """Lanes of an attention head: `head_dim`, or an even share of the hidden size."""
        if self.raw("head_dim") is not None:
            return int(self["head_dim"])
        self.divides("num_attention_heads", "hidden_size")
        return int(self["hidden_size"] // self["num_attention_heads"])

    def attention(
        self, *, rope: RopeSpec | None, bias: bool, scale: float | None = None, **more: Any
    ) -> AttentionLayer:
        """The attention layer of the common field names, and what else it has; `scale` None is head_dim**-0.5."""
        self.divides("num_key_value_heads", "num_attention_heads")
        return AttentionLayer(
            num_heads=self["num_attention_heads"],
            num_kv_heads=self["num_key_value_heads"],
            head_dim=self.head_dim(),
            scale=self.head_dim() ** -0.5 if scale is None else scale,
            rope=rope,
            qkv_bias=bias,
            o_bias=bias,
            **more,
        )

    def mamba(
        self,
        names: Mapping[str, str] = MAMBA_FIELDS,
        limits: tuple[float, float] | None = None,
        ssm_dtype: torch.dtype = torch.float32,
    ) -> MambaLayer:
        """The Mamba layer of the fields `names`. limits: of dt after softplus; None is `time_step_limit`, or none."""
        self.choice(names["activation"], ("silu",))
        self.divides(names["num_groups"], names["num_heads"])
        low, high = (
            limits or maybe(_limits)("time_step_limit", self.raw("time_step_limit")) or (0.0, math.inf)
        )
        read = {ours: self[name] for ours, name in names.items() if ours != "activation"}
        sizes = ("num_heads", "head_dim", "state_size", "num_groups", "conv_width")
        numbers = {name: read.pop(name) for name in sizes}
        state = Mamba2(**numbers, dt_min=low, dt_max=high, ssm_dtype=ssm_dtype)
        return MambaLayer(state, **read)

    def model(
        self,
        architecture: str,
        layers: tuple[Layer, ...],
        norm_eps: str = "rms_norm_eps",
        lengths: tuple[int, int] | None = None,
        **more: Any,
    ) -> ModelSpec:
        """The model of these layers, with what all have under the same names. norm_eps: the field. lengths: the longest
        request by default, and the longest that a user may choose, if no field says so.
        """
        longest, scaled = lengths or self._lengths()
        return ModelSpec(
            architecture=architecture,
            vocab_size=self["vocab_size"],
            hidden_size=self["hidden_size"],
            layers=layers,
            norm_eps=self[norm_eps],
            tie_word_embeddings=self["tie_word_embeddings"],
            max_position_embeddings=longest,
            max_scaled_positions=scaled,
            eos_token_ids=token_ids("eos_token_id", self.raw("eos_token_id")),
            **more,
        )

    def _lengths(self) -> tuple[int, int]:
        """Positions that the model was made for, and those that a user may choose with scaled rotary embedding.

        Files with YaRN often keep the `max_position_embeddings` of before. Of other kinds it is often the scaled length
        already, so that only a user can say more.
        """
        positions, parameters = self["max_position_embeddings"], self._rope_parameters
        kind, factor = str(parameters.get("rope_type")), parameters.get("factor") or 1.0
        original = parameters.get("original_max_position_embeddings") or positions
        if kind == "yarn":
            return max(positions, int(original * factor)), 0
        before = {"linear": positions, "dynamic": positions, "longrope": original}
        return positions, int(before.get(kind, 0) * factor)

    def rope(self, *, partial: bool, layer_type: str | None = None) -> RopeSpec:
        """Rotary embedding from `rope_parameters`, as transformers computes it.

        partial: whether the plain kind of this family heeds `partial_rotary_factor`; the scaled kinds always do.
        layer_type: the kind of layers whose parameters these are, if each kind has its own.
        """
        parameters = self.raw("rope_parameters") or {}
        if layer_type is not None:
            parameters = parameters[layer_type]
        if layer_type != "sliding_attention":
            self._rope_parameters = parameters
        kind = parameters.get("rope_type", "default")
        if kind not in _ROPE_NEEDS:
            raise ValueError(f"rope_type is {kind!r}; supported are {', '.join(_ROPE_NEEDS)}")
        _CHECKS["rope_theta"]("rope_theta", parameters.get("rope_theta"))
        try:
            return self._frequencies(kind, parameters, partial, layer_type)
        except (ArithmeticError, TypeError, RuntimeError):  # each passed its check, but not all together
            refuse("rope_parameters", parameters, "numbers that make frequencies")

    def _frequencies(
        self, kind: str, parameters: dict[str, Any], partial: bool, layer_type: str | None
    ) -> RopeSpec:
        if kind != "default":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            compute, cpu = ROPE_INIT_FUNCTIONS[kind], torch.device("cpu")
            inv_freq, scaling = compute(self.config, cpu, layer_type=layer_type)
            beyond: LongRope | DynamicRope | None = None
            if kind == "longrope":
                original = parameters["original_max_position_embeddings"]
                longer, _ = compute(self.config, cpu, seq_len=original + 1, layer_type=layer_type)
                beyond = LongRope(original, tuple(longer.tolist()))
            elif kind == "dynamic":
                original = self["max_position_embeddings"]
                beyond = DynamicRope(original, float(parameters["rope_theta"]), float(parameters["factor"]))
            return RopeSpec(tuple(inv_freq.tolist()), float(scaling), beyond)
        factor = float(parameters.get("partial_rotary_factor", 1.0)) if partial else 1.0
        lanes = self.head_dim()
        dim = int(lanes * factor)
        if dim < 2 or dim % 2 or dim > lanes:
            raise ValueError(f"{dim} of head_dim = {lanes} lanes rotate; it must be an even number of lanes")
        # In float32, with the operators of the reference: its rounding is part of the position code.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return RopeSpec(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
