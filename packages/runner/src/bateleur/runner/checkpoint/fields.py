"""Reads a Hugging Face configuration. Errors name the field, its value and the rule."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from bateleur.mamba import Mamba2
from bateleur.runner.checkpoint.field_rules import CHECKS, ROPE_NEEDS, limits_of_dt, token_ids
from bateleur.runner.models.rope import DynamicRope, LongRope, RopeSpec
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, Layer, MambaLayer, MlpLayer, ModelSpec, RouterSpec
from bateleur.runner.utils.arguments import Integer, maybe, refuse

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
"""Default field names of a Mamba layer."""
_FIELDS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"}
LOCAL_FIELDS = {"num_experts": "num_local_experts", "intermediate_size": "intermediate_size"}
"""Fields of GraniteMoeHybrid and gpt-oss."""
_SCORES = ("scoring_func", "moe_router_activation_func")
"""Fields with the scoring function of the router in some files; transformers does not read them."""
WINDOW_KINDS = ("full_attention", "sliding_attention")
"""Supported values of `layer_types` of attention with sliding windows."""
L = TypeVar("L", bound=Layer)


class ConfigFields:
    """A configuration of transformers, read field by field. Methods raise ValueError naming field, value and rule."""

    def __init__(self, config: Any, written: Mapping[str, Any] | None = None) -> None:
        """config: object with the fields as attributes. written: contents of config.json. If they name a field
        differently, errors use the name in `written`.
        """
        self.config = config
        self._written = written or {}
        self._rope_parameters: dict[str, Any] = {}
        """Set by `rope`."""

    def raw(self, name: str) -> Any:
        """Return a field without checking it; None if it is missing."""
        return getattr(self.config, name, None)

    def __getitem__(self, name: str) -> Any:
        return CHECKS[name](self.called(name), self.raw(name))

    def optional(self, name: str) -> Any:
        """Return the checked field; None if it is missing or null."""
        return None if self.raw(name) is None else self[name]

    def called(self, name: str) -> str:
        """Return the name under which the file has a field. transformers knows some fields by two names."""
        if name not in self._written:
            for pair in getattr(self.config, "attribute_map", {}).items():
                if name in pair:
                    return next((each for each in pair if each in self._written), name)
        return name

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """Return a field that must have one of the supported values."""
        value = self.raw(name)
        if value not in options:
            supported = ", ".join(repr(option) for option in options)
            raise ValueError(f"{name} is {value!r}; supported is {supported}")
        return str(value)

    def divides(self, part: str, whole: str) -> None:
        """Raise ValueError unless field `part` divides field `whole`."""
        if self[whole] % self[part]:
            named, of = self.called(part), self.called(whole)
            raise ValueError(f"{named} is {self[part]}; it must divide {of} = {self[whole]}")

    def head_dim(self) -> int:
        """Return the head size: `head_dim`, or the hidden size divided by the number of heads."""
        if (size := self.optional("head_dim")) is not None:
            return int(size)
        self.divides("num_attention_heads", "hidden_size")
        return int(self["hidden_size"] // self["num_attention_heads"])

    def attention(self, *, bias: bool | None = None, **given: Any) -> AttentionLayer:
        """Return the attention layer that the config fields of most families describe.

        bias: whether all projections have biases; None: `attention_bias`. given: arguments of
        `AttentionLayer` that differ from Llama's.
        """
        bias = self["attention_bias"] if bias is None else bias
        rope = given["rope"] if "rope" in given else self.rope()
        self.divides("num_key_value_heads", "num_attention_heads")
        return AttentionLayer(
            num_heads=self["num_attention_heads"],
            num_kv_heads=self["num_key_value_heads"],
            head_dim=self.head_dim(),
            **{"scale": self.head_dim() ** -0.5, "qkv_bias": bias, "o_bias": bias, **given, "rope": rope},
        )

    def mamba(
        self,
        names: Mapping[str, str] = MAMBA_FIELDS,
        limits: tuple[float, float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> MambaLayer:
        """Build a Mamba-2 layer. names: the config field for each key of `MAMBA_FIELDS`, such as `num_heads`.

        limits: bounds of dt after softplus; None: `time_step_limit`. dtype: dtype of the recurrent states.
        """
        self.choice(names["activation"], ("silu",))
        self.divides(names["num_groups"], names["num_heads"])
        low, high = limits or maybe(limits_of_dt)("time_step_limit", self.raw("time_step_limit")) or (0.0, math.inf)
        read = {ours: self[name] for ours, name in names.items() if ours != "activation"}
        sizes = ("num_heads", "head_dim", "state_size", "num_groups", "conv_width")
        numbers = {name: read.pop(name) for name in sizes}
        state = Mamba2(**numbers, dt_min=low, dt_max=high, ssm_dtype=dtype)
        return MambaLayer(state, **read)

    def gated_mlp(self) -> MlpLayer:
        """Read a gated MLP from Llama's field names. Without a field `mlp_bias` there are no biases."""
        self.choice("hidden_act", ("silu",))
        return MlpLayer(self["intermediate_size"], bias=self.optional("mlp_bias") or False)

    def granite_multipliers(self) -> dict[str, Any]:
        """Read Granite's multipliers of embeddings, branches and logits, as arguments of `ModelSpec`."""
        return {
            "embedding_multiplier": self["embedding_multiplier"],
            "residual_multiplier": self["residual_multiplier"],
            "logits_divisor": self["logits_scaling"],
        }

    def layers(self, listed: str, readers: Mapping[str, Callable[[], L]]) -> tuple[L, ...]:
        """Return a layer for each kind (such as "full_attention") in the field `listed`, made by `readers[kind]`."""
        kinds = self.raw(listed) or ()
        for i, kind in enumerate(kinds):
            if kind not in readers:
                raise ValueError(f"{listed}[{i}] is {kind!r}; supported are {', '.join(readers)}")
        made = {kind: readers[kind]() for kind in dict.fromkeys(kinds)}
        return tuple(made[kind] for kind in kinds)

    def windows(self, attention: AttentionLayer, **windowed: Any) -> tuple[AttentionLayer, ...]:
        """Return `attention` for each of `layer_types`; layers with a sliding window get the fields `windowed`."""

        def sliding() -> AttentionLayer:
            return replace(attention, sliding_window=self["sliding_window"], **windowed)

        return self.layers("layer_types", {"full_attention": lambda: attention, "sliding_attention": sliding})

    def at_least_1(self, name: str) -> int:
        """Return a size field. Raises ValueError for 0, which configurations of models without experts have."""
        return Integer(1)(self.called(name), self[name])

    def experts(self, router: RouterSpec, names: Mapping[str, str] = {}, **more: Any) -> ExpertsLayer:
        """Read a layer of experts.

        names: names of the config fields of `num_experts`, `top_k` and `intermediate_size`, if they are not
        "num_experts", "num_experts_per_tok" and "moe_intermediate_size". more: further arguments of `ExpertsLayer`.

        Raises ValueError if the configuration names another scoring function (softmax, sigmoid) than `router.scores`,
        or has more experts per token than the router can choose from.
        """
        for name in _SCORES:
            if self.raw(name) is not None:
                self.choice(name, (router.scores,))
        names = {**_FIELDS, **names}
        sizes: dict[str, Any] = {ours: self.at_least_1(name) for ours, name in names.items()}
        top, among = sizes["top_k"], sizes["num_experts"]
        most = among // router.num_groups * router.top_groups
        if top > most:
            of, named, tops = (self.called(name) for name in (names["num_experts"], "n_group", names["top_k"]))
            groups = f"topk_group = {router.top_groups} of {named} = {router.num_groups} groups of "
            where = f"{groups if router.num_groups > 1 else ''}{of} = {among}"
            raise ValueError(f"{tops} is {top}; it must be at most {most}: {where}")
        return ExpertsLayer(**sizes, router=router, **more)

    def sparse_layers(self, count: int, mlp: MlpLayer, experts: ExpertsLayer) -> tuple[Layer, ...]:
        """Return `experts` or `mlp` for each of `count` decoder layers.

        Every `decoder_sparse_step`-th layer has experts, except those listed in `mlp_only_layers`.
        """
        dense, step = self["mlp_only_layers"], self["decoder_sparse_step"]
        if bad := [i for i in dense if i >= count]:
            raise ValueError(f"mlp_only_layers holds {bad[0]}; it must be in [0, num_hidden_layers = {count})")
        return tuple(mlp if i in dense or (i + 1) % step else experts for i in range(count))

    def sigmoid_router(self, num_experts: str) -> RouterSpec:
        """Read the router of NemotronH and Kimi. num_experts: name of the field with the number of experts."""
        count, groups, top = (self.at_least_1(name) for name in (num_experts, "n_group", "topk_group"))
        self.divides("n_group", num_experts)
        if top > groups:
            raise ValueError(f"topk_group is {top}; it must be at most {self.called('n_group')} = {groups}")
        if groups > 1 and count < 2 * groups:
            of = self.called(num_experts)
            raise ValueError(f"{self.called('n_group')} is {groups}; a group needs two of {of} = {count}")
        return RouterSpec(
            scores="sigmoid",
            normalised=self["norm_topk_prob"],
            sum_eps=1e-20,
            scale=self["routed_scaling_factor"],
            corrected=True,
            num_groups=groups,
            top_groups=top,
        )

    def model(
        self,
        blocks: Sequence[Layer],
        following: Layer | Sequence[Layer] | None = None,
        *,
        norm_eps: str = "rms_norm_eps",
        lengths: tuple[int, int] | None = None,
        **more: Any,
    ) -> ModelSpec:
        """Return the model of these layers, with the fields that all families share. Its `architecture` is empty.

        blocks: first residual branch of each decoder layer, such as attention. following: the second one, such as an
        MLP: one for all layers, or one for each; None: layers have one branch. norm_eps: name of the field with the
        epsilon of norms. lengths: default and largest maximum length of a request, if no field has them. more: further
        arguments of `ModelSpec`.
        """
        longest, scaled = lengths or self._lengths()
        rows = [blocks]
        if following is not None:
            rows.append(following if isinstance(following, Sequence) else [following] * len(blocks))
        return ModelSpec(
            architecture="",
            vocab_size=self["vocab_size"],
            hidden_size=self["hidden_size"],
            layers=tuple(branch for layer in zip(*rows, strict=True) for branch in layer),
            norm_eps=self[norm_eps],
            tie_word_embeddings=self["tie_word_embeddings"],
            max_position_embeddings=longest,
            max_scaled_positions=scaled,
            eos_token_ids=token_ids("eos_token_id", self.raw("eos_token_id")),
            branches_per_layer=len(rows),
            **more,
        )

    def _lengths(self) -> tuple[int, int]:
        """Return the default maximum length of a request, and the largest that a user may choose (0: the default).

        With YaRN the default is at least the scaled length. Else it is `max_position_embeddings`, which may already be
        the scaled length.
        """
        positions, parameters = self["max_position_embeddings"], self._rope_parameters
        kind, factor = str(parameters.get("rope_type")), parameters.get("factor") or 1.0
        original = parameters.get("original_max_position_embeddings") or positions
        if kind == "yarn":
            return max(positions, int(original * factor)), 0
        before = {"linear": positions, "dynamic": positions, "longrope": original}
        return positions, int(before.get(kind, 0) * factor)

    def rope(self, *, partial: bool = False, layer_type: str | None = None) -> RopeSpec:
        """Return the rotary embedding of `rope_parameters`, as transformers computes it.

        partial: whether rope_type "default" uses `partial_rotary_factor`; scaled types always do.
        layer_type: layer type whose parameters are read, if each type has its own.
        """
        parameters = self.raw("rope_parameters") or {}
        if layer_type is not None:
            parameters = parameters[layer_type]
        if layer_type != "sliding_attention":
            self._rope_parameters = parameters
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_NEEDS:
            raise ValueError(f"rope_type is {kind!r}; supported are {', '.join(ROPE_NEEDS)}")
        CHECKS["rope_theta"]("rope_theta", parameters.get("rope_theta"))
        try:
            return self._frequencies(kind, parameters, partial, layer_type)
        except (ArithmeticError, TypeError, RuntimeError):  # valid one by one, but not together
            refuse("rope_parameters", parameters, "numbers that make frequencies")

    def _frequencies(self, kind: str, parameters: dict[str, Any], partial: bool, layer_type: str | None) -> RopeSpec:
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
