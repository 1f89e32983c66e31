"""How a request's tokens are chosen and when it ends. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral
from typing import Any, cast

from bateleur.runner.outputs import RequestOutputKind
from bateleur.runner.structured_outputs import StructuredOutputsParams, structured_outputs
from bateleur.runner.utils.arguments import (
    Integer,
    Number,
    OneOf,
    Several,
    flag,
    listed,
    maybe,
    member_of,
    refuse,
    shown,
    text,
)
from bateleur.runner.utils.options import Checked, option
from bateleur.runner.utils.vllm_names import SAMPLING, without

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0."""

MAX_CONTINUATIONS = 256
"""Of one prompt."""
MAX_STOP_CHARACTERS = 4096
"""In all stop strings of a request: a search takes no longer for more of them, but memory and time to prepare it."""

_INT64 = 1 << 63
_SEED = Integer(-_INT64, _INT64 - 1, rule="an integer of 64 bits, or None")
_STOPS = Several(text, "a string, a list of strings, or None")
_STOP_IDS = Several(Integer(0), "a list of token ids, or None")
_ALLOWED_IDS = Several(Integer(0), "a list of one token id or more, or None")
_BAD_WORDS = Several(text, "a list of strings, or None")
_TOKEN_ID = Integer(0, rule="a token id, an integer >= 0")
_BIAS, _BIAS_RULE = Number(-100, 100), "a mapping from token ids to numbers, or None"
_KINDS = OneOf(tuple(kind.name for kind in RequestOutputKind))


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops: tuple[str, ...] = (
        (text(name, value),) if isinstance(value, str) else _STOPS(name, () if value is None else value)
    )
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        refuse(name, value, f"of at most {MAX_STOP_CHARACTERS} characters in all")
    return stops


def _stop_ids(name: str, value: Any) -> tuple[int, ...]:
    return _STOP_IDS(name, () if value is None else value)


def _allowed_ids(name: str, value: Any) -> tuple[int, ...]:
    return _ALLOWED_IDS(name, value) or refuse(name, value, _ALLOWED_IDS.rule)


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    return _BAD_WORDS(name, () if value is None else value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    """Keys of JSON are strings."""
    if not isinstance(value, Mapping):
        refuse(name, value, _BIAS_RULE)
    biases: dict[int, float] = {}
    spelled = {
        key: int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
        for key in value
    }
    wrong = [key for key, token in spelled.items() if not _is_token_id(token)]
    if len(wrong) > 1:
        raise ValueError(
            f"keys of {name} are {listed(map(str, wrong))}; they must be token ids, integers >= 0"
        )
    for key, bias in value.items():
        token = _TOKEN_ID(f"a key of {name}", spelled[key])
        if token in biases:
            raise ValueError(f"{name} holds token {token} twice, as a number and as text")
        biases[token] = _BIAS(f"{name}[{token}]", bias)
    return biases or None


def _truncation(name: str, value: Any) -> int | None:
    if value is None or (type(value) is int and value == -1):
        return value
    return Integer(1, why=", -1, or None")(name, value)


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    spelled: RequestOutputKind | str = _KINDS(name, value)
    return member_of(RequestOutputKind, spelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Checked):
    """Sampling parameters of one request; immutable, checked when made.

    Any other name, and any value outside its rule, is a `ValueError` that names it.
    """

    n: int = option(1, Integer(1, MAX_CONTINUATIONS))
    """Continuations of the prompt, at most 256; with `seed`, number i has seed + i."""
    temperature: float = option(1.0, Number(0))
    """0 (or below 1e-5) takes the most likely token; otherwise logits are divided by it."""
    top_k: int = option(0, Integer(-1, why=" (0 and -1 keep all tokens)"))
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = option(1.0, Number(0, 1, above=True))
    """Keep the smallest set of most likely tokens with at least this probability, in (0, 1]."""
    min_p: float = option(0.0, Number(0, 1))
    """Keep tokens at least this fraction as likely as the most likely one, in [0, 1]."""
    seed: int | None = option(None, maybe(_SEED))
    """An int64; with it the tokens depend on prompt and seed alone, on none of what runs beside. Under speculative_rule
    "ratio" and "block" they depend on how many drafts each step tests, too, so that needs draft_policy "fixed": `LLM`
    warns of any other. None lets the engine choose one."""
    max_tokens: int | None = option(16, maybe(Integer(1, why=", or None")))
    """Most tokens to generate; None means up to the model's length."""
    min_tokens: int = option(0, Integer(0, _INT64 - 1, rule="an integer >= 0"))
    """Neither a stop token nor a stop string ends the request before this many tokens."""
    stop: Sequence[str] = option((), _stop)
    """Strings (or one string) that end the text, which is cut just before them; at most 4096 characters in all."""
    include_stop_str_in_output: bool = option(False, flag)
    """The text ends behind the stop string, or the text of the stop token, that ended it."""
    stop_token_ids: Sequence[int] = option((), _stop_ids)
    """Token ids that end the request like the end-of-sequence token."""
    ignore_eos: bool = option(False, flag)
    """Go on after the end-of-sequence token."""
    logprobs: int | None = option(None, maybe(Integer(-1, why=" (-1 is all), or None")))
    """Report this many most likely tokens per position, and the drawn one; -1 for all tokens, None for nothing."""
    prompt_logprobs: int | None = option(None, maybe(Integer(-1, why=" (-1 is all), or None")))
    """The same for the tokens of the prompt but the first. Its prefix is computed then, and not found in a cache."""
    repetition_penalty: float = option(1.0, Number(0, above=True))
    """> 0; logits of tokens in prompt or output are divided by it if positive, else multiplied."""
    presence_penalty: float = option(0.0, Number(-2, 2))
    """In [-2, 2]; subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = option(0.0, Number(-2, 2))
    """In [-2, 2]; subtracted for each time the token occurs in the output."""
    logit_bias: Mapping[int, float] | None = option(None, maybe(_logit_bias), hashed=False)
    """Numbers in [-100, 100] by token id, which are added to logits. Ids may be text, as keys of JSON are."""
    allowed_token_ids: Sequence[int] | None = option(None, maybe(_allowed_ids))
    """Only these tokens are drawn, and no end-of-sequence token unless it is one of them; None means all."""
    bad_words: Sequence[str] = option((), _bad_words)
    """Words that are not written, neither at the beginning of a text nor behind a space: of each the last token is not
    drawn where the output ends with those before it."""
    skip_special_tokens: bool = option(True, flag)
    """Special tokens have no text."""
    detokenize: bool = option(True, flag)
    """Outputs have text; without it there are no stop strings either."""
    return_tags: bool = option(False, flag)
    """List the tags in the text that the model wrote as one token, such as <think>, with their places."""
    truncate_prompt_tokens: int | None = option(None, _truncation)
    """Of a longer prompt take only so many tokens; -1: as many as leave room for max_tokens."""
    truncation_side: str = option("left", OneOf(("left", "right")))
    """The side of a prompt at which `truncate_prompt_tokens` takes tokens away."""
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, _output_kind)
    """What each report of a request that streams holds: CUMULATIVE, all so far; DELTA, what is new; FINAL_ONLY: there
    is one, at the end."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = option(
        None, maybe(structured_outputs)
    )
    """What the text must be: `StructuredOutputsParams`, or a mapping of their names."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.stop and not self.detokenize:
            refuse("detokenize", False, "True beside stop, whose strings are found in text")
        if self.n > 1 and self.greedy:
            refuse("n", self.n, "1 with temperature 0, where all continuations are the same")

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


def _by_name(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, with a ValueError for what has no name, or one that is not known."""

    @wraps(init)
    def checked(self: SamplingParams, /, *positional: object, **given: Any) -> None:
        if positional:
            raise ValueError(f"{shown(positional[0])} has no name; sampling parameters are given by name")
        given, known = without(SAMPLING, given), self.names()
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(
                f"unknown sampling parameter {', '.join(unknown)}; the known ones are {', '.join(known)}"
            )
        init(self, **given)

    return checked


SamplingParams.__init__ = _by_name(SamplingParams.__init__)  # type: ignore[method-assign]
