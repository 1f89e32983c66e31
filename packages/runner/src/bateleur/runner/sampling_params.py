"""How a request's tokens are chosen and when it ends. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from bateleur.runner.arguments import (
    Check,
    Integer,
    Number,
    Several,
    check_all,
    flag,
    maybe,
    refuse,
    shown,
    text,
)
from bateleur.runner.vllm_names import SAMPLING, without

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0."""

_INT64 = 1 << 63
_STOPS = Several(text, "a string, a list of strings, or None")
_STOP_IDS = Several(Integer(0), "a list of token ids, or None")
_CHECKS: dict[str, Check] = {
    "temperature": Number(0),
    "top_k": Integer(-1, why=" (0 and -1 keep all tokens)"),
    "top_p": Number(0, 1, above=True),
    "min_p": Number(0, 1),
    "seed": maybe(Integer(-_INT64, _INT64 - 1, rule="an integer of 64 bits, or None")),
    "max_tokens": maybe(Integer(1, why=", or None")),
    "min_tokens": Integer(0, _INT64 - 1, rule="an integer >= 0"),
    "stop": lambda name, value: (
        (text(name, value),) if isinstance(value, str) else _STOPS(name, () if value is None else value)
    ),
    "stop_token_ids": lambda name, value: _STOP_IDS(name, () if value is None else value),
    "ignore_eos": flag,
    "logprobs": maybe(Integer(0, why=", or None")),
    "repetition_penalty": Number(0, above=True),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
}


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
        /,
        *positional: object,
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
        **others: Any,
    ) -> None:
        if positional:
            raise ValueError(f"{shown(positional[0])} has no name; sampling parameters are given by name")
        if unknown := without(SAMPLING, others):
            known = ", ".join(self.names())
            raise ValueError(
                f"unknown sampling parameter {', '.join(sorted(unknown))}; the known ones are {known}"
            )
        given = locals()
        for name, value in check_all(_CHECKS, given).items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the accepted names."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SamplingParams:
        """Make parameters from a mapping such as a JSON object; `ValueError` as for the constructor."""
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            refuse("sampling parameters", values, "a mapping from names to values")
        return cls(**cast(dict[str, Any], dict(values)))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without any draw."""
        return self.temperature < GREEDY_BELOW
