"""Reading numbers from a configuration, with errors that name the field, its value and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bateleur.eagle.heads.spec import Rope

_MOST = {"num_hidden_layers": 1024, "max_position_embeddings": 1 << 31, "original_max_position_embeddings": 1 << 31}
_FLOAT32 = torch.finfo(torch.float32)


class Fields:
    """A JSON object, read field by field. A field that is null counts as missing."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {**(defaults or {}), **{k: v for k, v in values.items() if v is not None}}
        self._null = {name for name, value in values.items() if value is None}

    def raw(self, name: str) -> Any:
        """Return a field as it is; None if it is missing."""
        return self._values.get(name)

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer field, or `default` if it is missing.

        Raises ValueError without a value, or for one out of [1, 2^24]. `_MOST` has the fields with another maximum.
        """
        value, most = self._values.get(name, default), _MOST.get(name, 1 << 24)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}; it must be a whole number in [1, {most}]")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """Return an integer field of at least 1; None if the field is null, and `default` if it is missing."""
        if name in self._values:
            return self.size(name)
        return None if name in self._null else default

    def number(self, name: str, default: float) -> float:
        """Return a number, or `default` if missing. Raises ValueError unless it is finite and above 0 in float32."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _FLOAT32.tiny <= value <= _FLOAT32.max:
            raise ValueError(f"{name} is {value!r}; it must be a finite number above 0, in float32")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field, or `default` if it is missing. Raises ValueError for another type."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return value

    def choice(self, name: str, options: tuple[str, ...], default: str) -> str:
        """Return a text field, or `default` if it is missing. Raises ValueError unless it is one of `options`."""
        value = self._values.get(name, default)
        if value not in options:
            raise ValueError(f"{name} is {value!r}; supported is {', '.join(map(repr, options))}")
        return str(value)

    def choices(self, name: str, options: tuple[str, ...]) -> list[str]:
        """Return a list field, empty if it is missing. Raises ValueError unless all its items are in `options`."""
        value = self._values.get(name, [])
        if not isinstance(value, list) or any(each not in options for each in value):
            raise ValueError(f"{name} is {value!r}; it must be a list of {', '.join(map(repr, options))}")
        return value

    def inner(self, name: str) -> Fields:
        """Return the JSON object in a field, empty if it is missing. Raises ValueError for another type."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; it must be an object")
        return Fields(value)

    def boundaries(self, name: str, num_layers: int, *, shift: int = 0) -> tuple[int, ...] | None:
        """Return a list of layer ids, plus `shift` each, as boundaries between target layers; None if missing or empty.

        As in `TargetNeeds.taps`, boundary l is the input of layer l, and `num_layers` the output of the last layer.
        Raises ValueError if a boundary is repeated or not in [0, num_layers].
        """
        value = self._values.get(name)
        if value is None or value == []:
            return None
        whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        taps = tuple(i + shift for i in value) if whole else ()
        if not taps or len(set(taps)) < len(taps) or not all(0 <= tap <= num_layers for tap in taps):
            counted = "" if not shift else f" (counted as outputs of layers, so boundary = id + {shift})"
            raise ValueError(
                f"{name} is {value!r}{counted}; it must be distinct boundaries of a target of {num_layers} layers, "
                f"each from 0 to {num_layers}"
            )
        return taps

    def head_dim(self) -> int:
        """Return the size of an attention head: `head_dim`, or the hidden size divided by the number of heads."""
        if "head_dim" in self._values:
            return self.size("head_dim")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise ValueError(f"num_attention_heads is {heads}; without head_dim it must divide hidden_size = {hidden}")
        return hidden // heads

    def rope(self) -> Rope:
        """Return the rotary embedding of `rope_parameters`, or of `rope_theta` with `rope_scaling`."""
        nested = self.inner("rope_parameters" if "rope_parameters" in self._values else "rope_scaling")
        kind = str(nested.raw("rope_type") or nested.raw("type") or "default")
        theta = nested.number("rope_theta", self.number("rope_theta", 10000.0))
        share = nested.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        lanes = int(self.head_dim() * share)
        if lanes < 2 or lanes % 2 or lanes > self.head_dim():
            raise ValueError(
                f"{lanes} of head_dim = {self.head_dim()} lanes rotate; it must be an even number of lanes"
            )
        turns, scaling = [theta ** (-2.0 * i / lanes) for i in range(lanes // 2)], 1.0
        if kind == "linear":
            factor = nested.number("factor", 1.0)
            turns = [turn / factor for turn in turns]
        elif kind == "llama3":
            turns = [_llama3(turn, nested) for turn in turns]
        elif kind == "yarn":
            turns, scaling = _yarn(turns, theta, nested)
        elif kind != "default":
            raise ValueError(f"rope_type is {kind!r}; supported is 'default', 'linear', 'llama3', 'yarn'")
        if not max(turns) <= _FLOAT32.max:
            raise ValueError(f"rope_theta is {theta}; scaled, lanes turn by {max(turns)}, more than a float32 holds")
        return Rope(tuple(turns), scaling)


def _llama3(turn: float, fields: Fields) -> float:
    """Scale the rotary frequency `turn` as in Llama 3.1: kept if high, divided by `factor` if low, else between."""
    factor, low = fields.number("factor", 8.0), fields.number("low_freq_factor", 1.0)
    high, context = fields.number("high_freq_factor", 4.0), fields.size("original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}; it must be above low_freq_factor = {low}")
    periods = context * turn / (2.0 * math.pi)
    blend = min(1.0, max(0.0, (periods - low) / (high - low)))
    return turn * (blend + (1.0 - blend) / factor)


def _yarn(turns: list[float], theta: float, fields: Fields) -> tuple[list[float], float]:
    """Return the rotary frequencies `turns`, with base `theta`, scaled by YaRN, and its factor on cosine and sine.

    A frequency that makes many rotations within the original length is kept, one that makes few is divided by `factor`,
    and others are interpolated.
    """
    for name in ("mscale", "mscale_all_dim"):
        if fields.raw(name) is not None:
            raise ValueError(f"{name} is {fields.raw(name)!r}; YaRN is supported without it")
    if theta == 1.0:
        raise ValueError("rope_theta is 1; with YaRN it must be another number")
    factor, context = fields.number("factor", 1.0), fields.size("original_max_position_embeddings")
    ends = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    pairs = len(turns)
    low, high = (pairs * math.log(context / (2.0 * math.pi * end)) / math.log(theta) for end in ends)
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    slowed = [min(1.0, max(0.0, (i - low) / width)) for i in range(pairs)]
    mixed = [turn * (1.0 - part + part / factor) for turn, part in zip(turns, slowed, strict=True)]
    return mixed, fields.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
