"""Reading numbers from a Hugging Face configuration, with errors that name the field, its value and the rule."""

from __future__ import annotations

import math
from typing import Any

import torch

from bateleur.runner.models.spec import AttentionLayer, RopeSpec

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class ConfigFields:
    """A configuration object, read field by field.

    Every reader raises ValueError naming the field, its value and the rule it breaks; who opened the file adds its
    path.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def raw(self, name: str) -> Any:
        """The field as it is; None where there is none."""
        return getattr(self.config, name, None)

    def size(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value

    def number(self, name: str, *, above: float = -math.inf) -> float:
        """A finite number greater than `above`."""
        value = self.raw(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= above
        ):
            rule = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
            raise ValueError(f"{name} is {value!r}; it must be {rule}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.raw(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """One of the supported names."""
        value = self.raw(name)
        if value not in options:
            supported = ", ".join(repr(option) for option in options)
            raise ValueError(f"{name} is {value!r}; supported is {supported}")
        return str(value)

    def divides(self, part: str, whole: str) -> None:
        """Require that field `part` divides field `whole`."""
        if self.size(whole) % self.size(part):
            raise ValueError(f"{part} is {self.size(part)}; it must divide {whole} = {self.size(whole)}")

    def head_dim(self) -> int:
        """Lanes of an attention head: `head_dim`, or an even share of the hidden size."""
        if self.raw("head_dim") is not None:
            return self.size("head_dim")
        self.divides("num_attention_heads", "hidden_size")
        return self.size("hidden_size") // self.size("num_attention_heads")

    def attention(self, *, scale: float, rope: RopeSpec | None, bias: bool) -> AttentionLayer:
        """The attention layer of the common field names."""
        self.divides("num_key_value_heads", "num_attention_heads")
        return AttentionLayer(
            num_heads=self.size("num_attention_heads"),
            num_kv_heads=self.size("num_key_value_heads"),
            head_dim=self.head_dim(),
            scale=scale,
            rope=rope,
            qkv_bias=bias,
            o_bias=bias,
        )

    def time_step_limit(self) -> tuple[float, float]:
        """Bounds on dt after softplus; none given means none."""
        value = self.raw("time_step_limit")
        if value is None:
            return 0.0, math.inf
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not 0.0 <= float(value[0]) <= float(value[1])
        ):
            raise ValueError(f"time_step_limit is {value!r}; it must be two numbers with 0 <= low <= high")
        return float(value[0]), float(value[1])

    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple: the field may hold none, one or several."""
        value = self.raw("eos_token_id")
        ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(i, int) for i in ids):
            raise ValueError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
        return ids

    def rope(self, *, partial: bool) -> RopeSpec:
        """Rotary embedding from `rope_parameters`.

        Args:
            partial: whether the plain kind of this family heeds `partial_rotary_factor`; the scaled kinds always do.

        Raises:
            ValueError: a kind whose frequencies depend on the length of the sequence, or an unknown one.
        """
        parameters = self.raw("rope_parameters") or {}
        kind = parameters.get("rope_type", "default")
        if kind not in _STATIC_ROPE:
            raise ValueError(f"rope_type is {kind!r}; supported are {', '.join(_STATIC_ROPE)}")
        if kind == "default":
            return RopeSpec(self._default_frequencies(parameters, partial))
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](self.config, torch.device("cpu"))
        return RopeSpec(tuple(inv_freq.tolist()), float(scaling))

    def _default_frequencies(self, parameters: dict[str, Any], partial: bool) -> tuple[float, ...]:
        theta = parameters.get("rope_theta")
        if not isinstance(theta, int | float) or theta <= 0:
            raise ValueError(f"rope_theta is {theta!r}; it must be a number above 0")
        factor = float(parameters.get("partial_rotary_factor", 1.0)) if partial else 1.0
        dim = int(self.head_dim() * factor)
        if dim < 2 or dim % 2 or dim > self.head_dim():
            raise ValueError(
                f"{dim} of head_dim = {self.head_dim()} lanes rotate; it must be an even number of lanes"
            )
        # In float32, with the operators of the reference: its rounding is part of the position code.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / theta**exponents).tolist())
