"""Sampling parameters by name: every refusal, word for word."""

import math
from typing import Any

import numpy as np
import pytest

from bateleur.runner import SamplingParams

HUGE, LONG = 10**5000, f"1{'0' * 37}...{'0' * 39}"
NUMBER = [("1", "'1'"), (None, "None"), (True, "True"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
NUMBER += [(10**400, LONG), (HUGE, "a value of type int"), ([], "[]"), ({}, "{}"), (1j, "1j"), (b"1", "b'1'")]
WHOLE = [
    (1.5, "1.5"),
    (2.0, "2.0"),
    (True, "True"),
    ("3", "'3'"),
    ([], "[]"),
    (math.nan, "nan"),
    (np.float32(1), "np.float32(1.0)"),
]

SWITCH: list[tuple[Any, str]] = [(1, "1"), (0, "0"), (None, "None"), ("yes", "'yes'"), ([], "[]")]

RULES: dict[str, tuple[str, list[tuple[Any, str]]]] = {
    "temperature": ("a finite number >= 0", [*NUMBER, (-0.1, "-0.1"), (-1, "-1")]),
    "top_k": ("an integer >= -1 (0 and -1 keep all tokens)", [*WHOLE, (None, "None"), (-2, "-2")]),
    "top_p": ("a finite number in (0, 1]", [*NUMBER, (0, "0"), (-0.5, "-0.5"), (1.01, "1.01")]),
    "min_p": ("a finite number in [0, 1]", [*NUMBER, (-0.01, "-0.01"), (1.01, "1.01")]),
    "seed": ("an integer of 64 bits, or None", [*WHOLE, (2**63, str(2**63)), (-(2**63) - 1, str(-(2**63) - 1))]),
    "max_tokens": ("an integer >= 1, or None", [*WHOLE, (0, "0"), (-1, "-1")]),
    "min_tokens": ("an integer >= 0", [*WHOLE, (None, "None"), (-1, "-1"), (2**63, str(2**63))]),
    "ignore_eos": ("True or False", SWITCH),
    "include_stop_str_in_output": ("True or False", SWITCH),
    "skip_special_tokens": ("True or False", SWITCH),
    "detokenize": ("True or False", SWITCH),
    "n": ("an integer in [1, 256]", [*WHOLE, (None, "None"), (0, "0"), (257, "257"), (HUGE, "a value of type int")]),
    "return_tags": ("True or False", SWITCH),
    "truncate_prompt_tokens": ("an integer >= 1, -1, or None", [*WHOLE, (0, "0"), (-2, "-2"), (-1.0, "-1.0")]),
    "output_kind": (
        "one of CUMULATIVE, DELTA, FINAL_ONLY",
        [("delta", "'delta'"), (1, "1"), (None, "None"), (True, "True"), ([], "[]"), ("", "''")],
    ),
    "logprobs": ("an integer >= -1 (-1 is all), or None", [*WHOLE, (-2, "-2")]),
    "prompt_logprobs": ("an integer >= -1 (-1 is all), or None", [*WHOLE, (-2, "-2")]),
    "truncation_side": ("one of left, right", [(None, "None"), (5, "5"), ("both", "'both'")]),
    "repetition_penalty": ("a finite number > 0", [*NUMBER, (0, "0"), (-1, "-1")]),
    "presence_penalty": ("a finite number in [-2, 2]", [*NUMBER, (-2.1, "-2.1"), (2.1, "2.1")]),
    "frequency_penalty": ("a finite number in [-2, 2]", [*NUMBER, (-2.1, "-2.1"), (2.1, "2.1")]),
    "stop": (
        "a string, a list of strings, or None",
        [(3, "3"), (b"x", "b'x'"), ({"a"}, "{'a'}"), ({"a": 1}, "{'a': 1}"), (True, "True"), (1.5, "1.5")],
    ),
    "stop_token_ids": (
        "a list of token ids, or None",
        [(3, "3"), ("12", "'12'"), (b"12", "b'12'"), ({1}, "{1}"), (True, "True"), ({1: 1}, "{1: 1}")],
    ),
    "logit_bias": (
        "a mapping from token ids to numbers, or None",
        [(3, "3"), ([1], "[1]"), ("{}", "'{}'"), ([[1, 2]], "[[1, 2]]"), (True, "True"), ({1}, "{1}")],
    ),
    "allowed_token_ids": (
        "a list of one token id or more, or None",
        [([], "[]"), ((), "()"), (3, "3"), ("12", "'12'"), ({1}, "{1}"), (True, "True"), ({1: 1}, "{1: 1}")],
    ),
    "logprob_token_ids": (
        "a list of token ids, or None",
        [(3, "3"), ("12", "'12'"), ({1}, "{1}"), (True, "True"), ({1: 1}, "{1: 1}")],
    ),
    "bad_words": (
        "a list of strings, or None",
        [("word", "'word'"), (3, "3"), (b"x", "b'x'"), ({"a"}, "{'a'}"), (True, "True"), ({"a": 1}, "{'a': 1}")],
    ),
    "structured_outputs": (
        "StructuredOutputsParams, or a mapping of its fields",
        [("{}", "'{}'"), (3, "3"), ([], "[]"), (True, "True"), ({1: 2}, "{1: 2}")],
    ),
}
LISTED = ", ".join(["'ab'"] * 8)
INSIDE: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop is ''; it must be text that is not empty"),
    ({"stop": ["a", ""]}, "stop[1] is ''; it must be text that is not empty"),
    ({"stop": [1]}, "stop[0] is 1; it must be text that is not empty"),
    ({"stop": [None]}, "stop[0] is None; it must be text that is not empty"),
    ({"stop": [["a"]]}, "stop[0] is ['a']; it must be text that is not empty"),
    ({"stop": "\ud800"}, r"stop holds '\ud800' at position 0, half of a surrogate pair"),
    ({"stop": ["a", "b\ud800"]}, r"stop[1] holds '\ud800' at position 1, half of a surrogate pair"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] is -1; it must be an integer >= 0"),
    ({"stop_token_ids": [1, 1.0]}, "stop_token_ids[1] is 1.0; it must be an integer >= 0"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0] is True; it must be an integer >= 0"),
    ({"stop_token_ids": [None]}, "stop_token_ids[0] is None; it must be an integer >= 0"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0] is '1'; it must be an integer >= 0"),
    ({"logit_bias": {1: 101}}, "logit_bias[1] is 101; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {1: -100.5}}, "logit_bias[1] is -100.5; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {"7": math.nan}}, "logit_bias[7] is nan; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {7: -math.inf}}, "logit_bias[7] is -inf; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {7: None}}, "logit_bias[7] is None; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {7: "1"}}, "logit_bias[7] is '1'; it must be a finite number in [-100, 100]"),
    ({"logit_bias": {-1: 1}}, "a key of logit_bias is -1; it must be a token id, an integer >= 0"),
    ({"logit_bias": {"-1": 1}}, "a key of logit_bias is '-1'; it must be a token id, an integer >= 0"),
    ({"logit_bias": {"a": 1}}, "a key of logit_bias is 'a'; it must be a token id, an integer >= 0"),
    ({"logit_bias": {"": 1}}, "a key of logit_bias is ''; it must be a token id, an integer >= 0"),
    ({"logit_bias": {"\u0661": 1}}, "a key of logit_bias is '\u0661'; it must be a token id, an integer >= 0"),
    ({"logit_bias": {1.0: 1}}, "a key of logit_bias is 1.0; it must be a token id, an integer >= 0"),
    ({"logit_bias": {True: 1}}, "a key of logit_bias is True; it must be a token id, an integer >= 0"),
    ({"logit_bias": {1: 1, "1": 2}}, "logit_bias holds token 1 twice, as a number and as text"),
    (
        {"logit_bias": {"1" * 5000: 1}},
        f"a key of logit_bias is '{'1' * 37}...{'1' * 38}'; it must be a token id, an integer >= 0",
    ),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0] is -1; it must be an integer >= 0"),
    ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1] is '2'; it must be an integer >= 0"),
    ({"allowed_token_ids": [1, None]}, "allowed_token_ids[1] is None; it must be an integer >= 0"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids[0] is -1; it must be an integer >= 0"),
    ({"bad_words": [""]}, "bad_words[0] is ''; it must be text that is not empty"),
    ({"bad_words": ["a", 1]}, "bad_words[1] is 1; it must be text that is not empty"),
    ({"bad_words": [None]}, "bad_words[0] is None; it must be text that is not empty"),
    ({"bad_words": ["a\ud800"]}, r"bad_words[0] holds '\ud800' at position 1, half of a surrogate pair"),
    ({"stop": ["ab"] * 3000}, f"stop is [{LISTED}, ...]; it must be of at most 4096 characters in all"),
    ({"stop": "x" * 4097}, f"stop is '{'x' * 37}...{'x' * 38}'; it must be of at most 4096 characters in all"),
    (
        {"stop": "x", "detokenize": False},
        "detokenize is False; it must be True with stop, because stop strings are searched in text",
    ),
    (
        {"n": 2, "temperature": 0},
        "n is 2; it must be 1 with temperature 0, because all continuations would be the same",
    ),
    ({"min_tokens": 17}, "min_tokens is 17; it must be at most max_tokens = 16"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens is 4; it must be at most max_tokens = 3"),
]


def brief(value: object) -> str:
    return ascii(value)[1:41] if isinstance(value, str) else ""


def test_every_name_has_its_refusals() -> None:
    assert set(RULES) == set(SamplingParams.names())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(n, v, f"{n} is {shown}; it must be {rule}") for n, (rule, values) in RULES.items() for v, shown in values],
    ids=brief,
)
def test_values(refused: Any, name: str, value: Any, message: str) -> None:
    with refused(message):
        SamplingParams(**{name: value})
    with refused(message):
        SamplingParams.from_dict({name: value})


@pytest.mark.parametrize(("params", "message"), INSIDE, ids=brief)
def test_what_is_inside(refused: Any, params: dict[str, Any], message: str) -> None:
    with refused(message):
        SamplingParams(**params)


KNOWN = "; the known ones are " + ", ".join(SamplingParams.names())
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, f"unknown sampling parameter foo{KNOWN}"),
    ({"temprature": 1}, f"unknown sampling parameter temprature{KNOWN}"),
    ({"self": 1}, f"unknown sampling parameter self{KNOWN}"),
    ({"positional": 1}, f"unknown sampling parameter positional{KNOWN}"),
    ({"others": 1, "given": 2, "n": 1}, f"unknown sampling parameter given, others{KNOWN}"),
    ({"best_of": 2}, "best_of is 2; it must be None or 1: every continuation is returned; use n"),
    ({"logits_processors": [1]}, "logits_processors is [1]; it must be None or []: there are none"),
    ({"guided_decoding": {}}, "guided_decoding is {}; it must be None: use structured_outputs"),
    (
        {"spaces_between_special_tokens": False},
        "spaces_between_special_tokens is False; it must be True: text is what the tokenizer makes of all tokens "
        "together",
    ),
    ({"extra_args": {"a": 1}}, "extra_args is {'a': 1}; it must be None or {}: there are none"),
]


@pytest.mark.parametrize(("params", "message"), UNKNOWN, ids=brief)
def test_other_names(refused: Any, params: dict[str, Any], message: str) -> None:
    with refused(message):
        SamplingParams(**params)
    with refused(message):
        SamplingParams.from_dict(params)


def test_names_of_vllm_that_ask_for_what_there_is() -> None:
    asked = {"n": 1, "best_of": None, "logit_bias": {}, "bad_words": [], "detokenize": True, "guided_decoding": None}
    assert SamplingParams(**asked, top_k=3) == SamplingParams(top_k=3)


@pytest.mark.parametrize(
    ("values", "shown"), [(None, "None"), ("x", "'x'"), ({1: 2}, "{1: 2}"), ([("n", 1)], "[('n', 1)]"), (5, "5")]
)
def test_from_dict(refused: Any, values: Any, shown: str) -> None:
    with refused(f"sampling parameters is {shown}; it must be a mapping from names to values"):
        SamplingParams.from_dict(values)


def test_values_without_a_name(refused: Any) -> None:
    with refused("0.5 has no name; sampling parameters are given by name"):
        SamplingParams(0.5)
