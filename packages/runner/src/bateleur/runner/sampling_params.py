"""Sampling parameters of a request, with vLLM's names, and their defaults in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from bateleur.runner.outputs import RequestOutputKind
from bateleur.runner.structured_outputs import StructuredOutputsParams, structured_outputs
from bateleur.runner.utils.arguments import (
    Check,
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
from bateleur.runner.utils.json_file import errors_in, read_json
from bateleur.runner.utils.options import Checked, option
from bateleur.runner.utils.vllm_names import SAMPLING, drop_unsupported

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0."""

MAX_CONTINUATIONS = 256
"""Maximum of `n`."""
MAX_STOP_CHARACTERS = 4096
"""Maximum number of characters in all stop strings of a request: it bounds the memory and time to prepare a search."""

_GENERATION_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Fields of `generation_config.json`, read as in vLLM, and the sampling parameters that they set."""
_NOT_SAMPLING = ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")

_INT64 = 1 << 63
_SEED = Integer(-_INT64, _INT64 - 1, rule="an integer of 64 bits, or None")
_STOPS = Several(text, "a string, a list of strings, or None")
_STOP_IDS = Several(Integer(0), "a list of token ids, or None")
_ALLOWED_IDS = Several(Integer(0), "a list of one token id or more, or None")
_BAD_WORDS = Several(text, "a list of strings, or None")
_TOKEN_ID = Integer(0, rule="a token id, an integer >= 0")
_BIAS, _BIAS_RULE = Number(-100, 100), "a mapping from token ids to numbers, or None"
_KINDS = OneOf(tuple(kind.name for kind in RequestOutputKind))


def _or_none(check: Check) -> Check:
    """Return a check that treats None as an empty sequence."""
    return lambda name, value: check(name, () if value is None else value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops: tuple[str, ...] = (text(name, value),) if isinstance(value, str) else _or_none(_STOPS)(name, value)
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        refuse(name, value, f"of at most {MAX_STOP_CHARACTERS} characters in all")
    return stops


def _allowed_ids(name: str, value: Any) -> tuple[int, ...]:
    return _ALLOWED_IDS(name, value) or refuse(name, value, _ALLOWED_IDS.rule)


def _logprob_ids(name: str, value: Any) -> tuple[int, ...] | None:
    return tuple(dict.fromkeys(_STOP_IDS(name, value))) or None


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    """Return `logit_bias` with integer keys, checked. Keys may be text, as in JSON."""
    if not isinstance(value, Mapping):
        refuse(name, value, _BIAS_RULE)
    biases: dict[int, float] = {}
    spelled = {
        key: int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
        for key in value
    }
    wrong = [key for key, token in spelled.items() if not _is_token_id(token)]
    if len(wrong) > 1:
        raise ValueError(f"keys of {name} are {listed(map(str, wrong))}; they must be token ids, integers >= 0")
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
    """Sampling parameters of one request, immutable and checked when made.
    Raises ValueError, naming the parameter, for unknown names or invalid values. return_tags: list tags like <think>.
    """

    n: int = option(1, Integer(1, MAX_CONTINUATIONS))
    """Number of continuations of the prompt, at most 256; with `seed`, continuation i has seed + i."""
    temperature: float = option(1.0, Number(0))
    """Divides the logits; 0 (or below 1e-5) takes the most likely token."""
    top_k: int = option(0, Integer(-1, why=" (0 and -1 keep all tokens)"))
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = option(1.0, Number(0, 1, above=True))
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this, in (0, 1]."""
    min_p: float = option(0.0, Number(0, 1))
    """Keep tokens at least this fraction as likely as the most likely one, in [0, 1]."""
    seed: int | None = option(None, maybe(_SEED))
    """Seed of the noise, an int64; None lets the engine choose one. With a seed, tokens depend on prompt and seed only,
    not on other requests. With speculative_rule "ratio" or "block" they also depend on the number of drafts of each
    step: use draft_policy "fixed" (`LLM` warns of others)."""
    max_tokens: int | None = option(16, maybe(Integer(1, why=", or None")))
    """Maximum number of tokens to generate; None: up to the model's length."""
    min_tokens: int = option(0, Integer(0, _INT64 - 1, rule="an integer >= 0"))
    """Minimum number of tokens before a stop token or stop string may end the request."""
    stop: Sequence[str] = option((), _stop)
    """String or strings that end the text, which is cut before them; at most 4096 characters in all."""
    include_stop_str_in_output: bool = option(False, flag)
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    stop_token_ids: Sequence[int] = option((), _or_none(_STOP_IDS))
    """Token ids that end the request like the end-of-sequence token."""
    ignore_eos: bool = option(False, flag)
    """Continue after the end-of-sequence token."""
    logprobs: int | None = option(None, maybe(Integer(-1, why=" (-1 is all), or None")))
    """Return log probabilities of the drawn token and this many most likely ones; -1 for all tokens, None for none."""
    logprob_token_ids: Sequence[int] | None = option(None, maybe(_logprob_ids))
    """Return log probabilities of these tokens instead of the most likely ones. Sets `logprobs` to their number."""
    prompt_logprobs: int | None = option(None, maybe(Integer(-1, why=" (-1 is all), or None")))
    """Return log probabilities of prompt tokens, all but the first, as for `logprobs`. The prompt is then computed
    without the prefix cache."""
    repetition_penalty: float = option(1.0, Number(0, above=True))
    """Divides positive logits of tokens in prompt or output and multiplies negative ones; > 0."""
    presence_penalty: float = option(0.0, Number(-2, 2))
    """Subtracted once from the logits of tokens in the output; in [-2, 2]."""
    frequency_penalty: float = option(0.0, Number(-2, 2))
    """Subtracted from the logits of a token for each time it occurs in the output; in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = option(None, maybe(_logit_bias), hashed=False)
    """Numbers in [-100, 100] by token id, added to the logits. Ids may be text, as in JSON."""
    allowed_token_ids: Sequence[int] | None = option(None, maybe(_allowed_ids))
    """Draw only these tokens, and no end-of-sequence token unless it is one of them; None: all tokens."""
    bad_words: Sequence[str] = option((), _or_none(_BAD_WORDS))
    """Words that are not generated, neither at the start of the text nor after a space: the last token of a word is not
    drawn if the output ends with the other ones."""
    skip_special_tokens: bool = option(True, flag)
    """Leave special tokens out of the text."""
    detokenize: bool = option(True, flag)
    """Return text; False excludes stop strings."""
    return_tags: bool = option(False, flag)
    """List the tags in the text that the model generated as one token, such as <think>, with their positions."""
    truncate_prompt_tokens: int | None = option(None, _truncation)
    """Shorten a longer prompt to this many tokens; -1: to what leaves room for max_tokens."""
    truncation_side: str = option("left", OneOf(("left", "right")))
    """Side of the prompt at which `truncate_prompt_tokens` removes tokens."""
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, _output_kind)
    """What each output of a streaming request contains: CUMULATIVE: everything so far; DELTA: what is new; FINAL_ONLY:
    a single output at the end."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = option(None, maybe(structured_outputs))
    """Required form of the text: `StructuredOutputsParams`, or a mapping of its fields."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.logprob_token_ids:
            object.__setattr__(self, "logprobs", len(self.logprob_token_ids))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.stop and not self.detokenize:
            refuse("detokenize", False, "True with stop, because stop strings are searched in text")
        if self.n > 1 and self.greedy:
            refuse("n", self.n, "1 with temperature 0, because all continuations would be the same")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all parameters."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SamplingParams:
        """Return parameters from a mapping such as a JSON object. Raises ValueError as the constructor does."""
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            refuse("sampling parameters", values, "a mapping from names to values")
        return cls(**cast(dict[str, Any], dict(values)))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without sampling."""
        return self.temperature < GREEDY_BELOW


def _by_name(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor, so that positional and unknown arguments raise ValueError."""

    @wraps(init)
    def checked(self: SamplingParams, /, *positional: object, **given: Any) -> None:
        if positional:
            raise ValueError(f"{shown(positional[0])} has no name; sampling parameters are given by name")
        given, known = drop_unsupported(SAMPLING, given), self.names()
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"unknown sampling parameter {', '.join(unknown)}; the known ones are {', '.join(known)}")
        init(self, **given)

    return checked


SamplingParams.__init__ = _by_name(SamplingParams.__init__)  # type: ignore[method-assign]


def recommended_sampling(
    folder: Path, generation_config: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint folder recommends, by name.
    generation_config: "auto" reads the folder's generation_config.json if there is one, "vllm" reads none; another text
    is a folder to read it from.
    overrides: fields of the file or sampling parameters that replace those of the file. Raises ValueError, naming the
    file, for an invalid value.
    """
    source = folder if generation_config == "auto" else Path(generation_config)
    file = source / "generation_config.json"
    if generation_config not in ("auto", "vllm") and not file.is_file():
        refuse("generation_config", generation_config, f"auto, vllm, or a folder with {file.name}")
    stored = read_json(file) if generation_config != "vllm" and file.is_file() else {}
    params = {ours: stored[theirs] for theirs, ours in _GENERATION_NAMES.items() if stored.get(theirs) is not None}
    given = {_GENERATION_NAMES.get(name, name): value for name, value in (overrides or {}).items()}
    params_and_given = params | {name: value for name, value in given.items() if name not in _NOT_SAMPLING}
    for origin, values in ((str(file), params), ("override_generation_config", params_and_given)):
        with errors_in(origin):
            SamplingParams.from_dict(values)
    return params_and_given
