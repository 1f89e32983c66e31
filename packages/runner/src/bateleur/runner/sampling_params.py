"""How a request's tokens are chosen and when it ends. The names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Never, cast

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0."""

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """Sampling parameters of one request; immutable, checked when made.

    temperature: 0 (or below 1e-5) takes the most likely token; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens with at least this probability, in (0, 1].
    min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
    seed: int64; with it the tokens depend on prompt and seed alone, on none of what runs beside. Under speculative_rule
        "ratio" and "block" they depend on how many drafts each step tests, too, so that needs draft_policy "fixed":
        `LLM` warns of any other. None lets the engine choose one.
    max_tokens: most tokens to generate; None means up to the model's length.
    min_tokens: neither a stop token nor a stop string ends the request before this many tokens.
    stop: strings (or one string) that end the text, which is cut just before them.
    stop_token_ids: token ids that end the request like the end-of-sequence token.
    ignore_eos: go on after the end-of-sequence token.
    logprobs: report this many most likely tokens per position, and the drawn one; None reports nothing.
    repetition_penalty: > 0; logits of tokens in prompt or output are divided by it if positive, else
        multiplied.
    presence_penalty: in [-2, 2]; subtracted once from the logits of tokens in the output.
    frequency_penalty: in [-2, 2]; subtracted for each time the token occurs in the output.

    Any other name, and any value outside its rule, is a `ValueError` that names it.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise ValueError(
                f"unknown sampling parameter {', '.join(sorted(unknown))}; "
                f"the known ones are {', '.join(self.names())}"
            )
        if not isinstance(ignore_eos, bool):
            raise ValueError(f"ignore_eos={ignore_eos!r} must be True or False")
        values: dict[str, object] = {
            "temperature": _real("temperature", temperature, ">= 0", low=0.0),
            "top_k": _integer("top_k", top_k, ">= -1 (0 and -1 keep all tokens)", low=-1),
            "top_p": _real("top_p", top_p, "in (0, 1]", low=0.0, high=1.0, open_low=True),
            "min_p": _real("min_p", min_p, "in [0, 1]", low=0.0, high=1.0),
            "seed": _seed(seed),
            "max_tokens": _optional("max_tokens", max_tokens, low=1),
            "min_tokens": _integer("min_tokens", min_tokens, ">= 0", low=0),
            "stop": _strings(stop),
            "stop_token_ids": _token_ids(stop_token_ids),
            "ignore_eos": ignore_eos,
            "logprobs": _optional("logprobs", logprobs, low=0),
            "repetition_penalty": _real(
                "repetition_penalty", repetition_penalty, "> 0", low=0.0, open_low=True
            ),
            "presence_penalty": _real("presence_penalty", presence_penalty, "in [-2, 2]", low=-2.0, high=2.0),
            "frequency_penalty": _real(
                "frequency_penalty", frequency_penalty, "in [-2, 2]", low=-2.0, high=2.0
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be <= max_tokens={self.max_tokens}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the accepted names."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SamplingParams:
        """Make parameters from a mapping such as a JSON object; `ValueError` as for the constructor."""
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ValueError(f"sampling parameters must be a mapping from names to values, got {values!r}")
        return cls(**cast(dict[str, Any], dict(values)))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any draw."""
        return self.temperature < GREEDY_BELOW


def _real(
    name: str,
    value: object,
    rule: str,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    """Return `value` as a float, or raise `ValueError` naming argument, value and rule."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = _as_float(value)
        if math.isfinite(number) and low <= number <= high and not (open_low and number == low):
            return number
    raise ValueError(f"{name}={value!r} must be a finite number {rule}")


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range: as good as infinite
        return math.inf


def _integer(name: str, value: object, rule: str, *, low: int) -> int:
    """Return `value` as an int, or raise `ValueError`; a bool is no int here."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low:
        return int(value)
    raise ValueError(f"{name}={value!r} must be an integer {rule}")


def _optional(name: str, value: object, *, low: int) -> int | None:
    return None if value is None else _integer(name, value, f">= {low}, or None", low=low)


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value, "in the range of int64, or None", low=-_INT64)
    if seed >= _INT64:
        raise ValueError(f"seed={value!r} must be an integer in the range of int64, or None")
    return seed


def _strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise ValueError(f"stop={value!r} must be a string, a list of strings, or None")
    for text in listed:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={value!r} must hold non-empty strings only, got {text!r}")
    return tuple(listed)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise ValueError(f"stop_token_ids={value!r} must be a list of token ids, or None")
    return tuple(_integer("stop_token_ids", token_id, ">= 0", low=0) for token_id in value)
