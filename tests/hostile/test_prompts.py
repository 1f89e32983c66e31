"""Prompts, sampling parameters beside them, request ids and switches: what is refused, and that nobody else notices."""

import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.llm import LLM as Class
from bateleur.runner.utils.arguments import shown as in_words

VOCAB, LONGEST = 101, 64
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DEEP: list[Any] = []
for _ in range(3000):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def running(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    """The engine, with a request in the middle of its tokens all the while: it ends as if nothing had happened."""
    made = LLM(tiny("llama"), device="cpu", max_model_len=LONGEST, max_num_seqs=4)
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (expected,) = made.generate("abc", long)
    name = made.add_request("abc", long)
    made.step()
    yield made
    outputs = []
    while made.has_unfinished_requests:
        outputs += made.step()
    assert [(o.request_id, o.outputs[0]) for o in outputs] == [(name, expected.outputs[0])]


@pytest.fixture
def busy(running: LLM) -> Iterator[LLM]:
    """Whatever is refused, nothing is added."""
    before = set(running.engine.requests)
    yield running
    assert set(running.engine.requests) == before
    assert not running.engine.registry.fetched_by_caller


@pytest.fixture(scope="module")
def idle(tiny: Callable[[str], Path]) -> LLM:
    return LLM(tiny("llama"), device="cpu", max_model_len=LONGEST, max_num_seqs=4)


TOKEN = f"a token id, an integer in [0, {VOCAB - 1}]"
SEQUENCE = "text or a sequence of token ids"
MANY = "text, token ids, or a sequence of these"
KEYS = "a mapping with prompt or prompt_token_ids, or both, and nothing else"
EMPTY = "prompt is empty; at least one token is needed"


def brief(value: object) -> str:
    return ascii(value)[1:31] if isinstance(value, str) else ""


TOO_LONG = (
    f"this model's maximum context length is {LONGEST} tokens (max_model_len), the output included: reduce the length "
    "of the messages or of the prompt"
)


def must(name: str, shown: str, rule: str) -> str:
    return f"{name} is {shown}; it must be {rule}"


# What `add_request` says of a prompt, and `generate` behind "prompts[0]: ".
PROMPTS: list[tuple[Any, str]] = [
    ("", EMPTY),
    ({"prompt": ""}, EMPTY),
    ({"prompt_token_ids": []}, EMPTY),
    ({"prompt_token_ids": np.array([], dtype=np.int64)}, EMPTY),
    ("\ud800", r"prompt holds '\ud800' at position 0, half of a surrogate pair"),
    ("ab\udfff", r"prompt holds '\udfff' at position 2, half of a surrogate pair"),
    ({"prompt": "\ud83d"}, r"prompt holds '\ud83d' at position 0, half of a surrogate pair"),
    ({"prompt_token_ids": "abc"}, must("prompt_token_ids", "'abc'", "a sequence of token ids")),
    ({"prompt_token_ids": None}, must("prompt_token_ids", "None", "a sequence of token ids")),
    ({"prompt_token_ids": {1}}, must("prompt_token_ids", "{1}", "a sequence of token ids")),
    ({"prompt_token_ids": b"ab"}, must("prompt_token_ids", "b'ab'", "a sequence of token ids")),
    ({"prompt_token_ids": {"a": 1}}, must("prompt_token_ids", "{'a': 1}", "a sequence of token ids")),
    ({"prompt_token_ids": 5}, must("prompt_token_ids", "5", "a sequence of token ids")),
    ({"prompt_token_ids": [1, "a"]}, must("prompt_token_ids[1]", "'a'", TOKEN)),
    ({"prompt_token_ids": [VOCAB]}, must("prompt_token_ids[0]", "101", TOKEN)),
    ({"prompt": [1, 2]}, must("prompt", "[1, 2]", "text")),
    ({"prompt": 5}, must("prompt", "5", "text")),
    ({"prompt": None}, must("prompt", "None", "text")),
    ({"prompt": b"x"}, must("prompt", "b'x'", "text")),
    ({"prompt": {"prompt": "x"}}, must("prompt", "{'prompt': 'x'}", "text")),
    ({}, must("prompt", "{}", KEYS)),
    ({"text": "x"}, must("prompt", "{'text': 'x'}", KEYS)),
    ({1: "x"}, must("prompt", "{1: 'x'}", KEYS)),
    ({"prompt": "x", "multi_modal_data": None}, must("prompt", "{'multi_modal_data': None, 'prompt': 'x'}", KEYS)),
    ({"prompt": ["x"], "prompt_token_ids": [1]}, must("prompt", "['x']", "text")),
    ([1, VOCAB], must("prompt[1]", "101", TOKEN)),
    ([1, -1], must("prompt[1]", "-1", TOKEN)),
    ([1, 2.5], must("prompt[1]", "2.5", TOKEN)),
    ([1, "a"], must("prompt[1]", "'a'", TOKEN)),
    ([1, None], must("prompt[1]", "None", TOKEN)),
    ([1, True], must("prompt[1]", "True", TOKEN)),
    ([1, [2]], must("prompt[1]", "[2]", TOKEN)),
    ([1, float("nan")], must("prompt[1]", "nan", TOKEN)),
    ([1, 10**30], must("prompt[1]", str(10**30), TOKEN)),
    ([1, 10**5000], must("prompt[1]", "a value of type int", TOKEN)),
    ([1, np.float32(3)], must("prompt[1]", "np.float32(3.0)", TOKEN)),
    ([1, np.int64(VOCAB)], must("prompt[1]", "np.int64(101)", TOKEN)),
    ([1, np.bool_(True)], must("prompt[1]", "np.True_", TOKEN)),
    ([True, False], must("prompt[0]", "True", TOKEN)),
    ((5, -2), must("prompt[1]", "-2", TOKEN)),
    (range(-1, 3), must("prompt[0]", "-1", TOKEN)),
    (array.array("i", [1, 200]), must("prompt[1]", "200", TOKEN)),
    (np.array([1.5]), must("prompt[0]", "1.5", TOKEN)),
    (np.array([True]), must("prompt[0]", "True", TOKEN)),
    (np.array([1, 500]), must("prompt[1]", "500", TOKEN)),
    (np.array(["a"]), must("prompt[0]", "'a'", TOKEN)),
    (torch.tensor([1.5]), must("prompt[0]", "1.5", TOKEN)),
    (torch.tensor([1, -1]), must("prompt[1]", "-1", TOKEN)),
    ("x" * LONGEST, f"prompt has 64 tokens; {TOO_LONG}"),
    ([5] * 300, f"prompt has 300 tokens; {TOO_LONG}"),
    ("y" * 100_000, f"prompt has 100000 tokens; {TOO_LONG}"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=brief)
@pytest.mark.parametrize("way", ["generate", "stream", "add_request"])
def test_prompts(busy: LLM, refused: Any, way: str, prompt: Any, message: str) -> None:
    with refused(message if way == "add_request" else f"prompts[0]: {message}"):
        getattr(busy, way)(prompt, GREEDY)


# What is no prompt: what `generate` says, and `add_request`.
NO_PROMPTS: list[tuple[Any, str, str]] = [
    (value, must("prompts", shown, MANY), must("prompt", shown, SEQUENCE))
    for value, shown in [
        (b"import os", "b'import os'"),
        (bytearray(b"x"), "bytearray(b'x')"),
        (None, "None"),
        (5, "5"),
        (2.5, "2.5"),
        (True, "True"),
        (1j, "1j"),
        ({1, 2}, "{1, 2}"),
        (frozenset("a"), "frozenset({'a'})"),
        (10**400, f"1{'0' * 37}...{'0' * 39}"),
        (10**5000, "a value of type int"),
        (Class, "<class 'bateleur.runner.llm.LLM'>"),
        (Ellipsis, "Ellipsis"),
        (np.array(3), "array(3)"),
        (np.array([[1, 2]]), "array([[1, 2]])"),
        (torch.tensor(3), "tensor(3)"),
        (torch.tensor([[1, 2]]), "tensor([[1, 2]])"),
        (GREEDY.names().__iter__().__class__, "<class 'tuple_iterator'>"),
    ]
]


@pytest.mark.parametrize(("value", "many", "one"), NO_PROMPTS, ids=brief)
def test_what_is_no_prompt(busy: LLM, refused: Any, value: Any, many: str, one: str) -> None:
    with refused(many):
        busy.generate(value, GREEDY)
    with refused(many):
        busy.stream(value, GREEDY)
    with refused(one):
        busy.add_request(value, GREEDY)


# A wrong prompt among right ones is named, and none is started.
IN_LISTS: list[tuple[Any, str]] = [
    (["a", 1], "prompts[1]: " + must("prompt", "1", SEQUENCE)),
    (["a", None], "prompts[1]: " + must("prompt", "None", SEQUENCE)),
    (["a", b"x"], "prompts[1]: " + must("prompt", "b'x'", SEQUENCE)),
    (["a", "b", ""], f"prompts[2]: {EMPTY}"),
    ([[]], f"prompts[0]: {EMPTY}"),
    ([""], f"prompts[0]: {EMPTY}"),
    ([None], "prompts[0]: " + must("prompt", "None", SEQUENCE)),
    ([1.5], "prompts[0]: " + must("prompt", "1.5", SEQUENCE)),
    ([np.float32(3)], "prompts[0]: " + must("prompt", "np.float32(3.0)", SEQUENCE)),
    ([[None]], "prompts[0]: " + must("prompt[0]", "None", TOKEN)),
    ([[[1]]], "prompts[0]: " + must("prompt[0]", "[1]", TOKEN)),
    ([[1], [2], [9999]], "prompts[2]: " + must("prompt[0]", "9999", TOKEN)),
    ([[1], [9999], [3]], "prompts[1]: " + must("prompt[0]", "9999", TOKEN)),
    (([1], "x", {"text": 1}), "prompts[2]: " + must("prompt", "{'text': 1}", KEYS)),
    ([{1, 2}], "prompts[0]: " + must("prompt", "{1, 2}", SEQUENCE)),
    (DEEP, "prompts[0]: " + must("prompt[0]", "[[[[[[[...]]]]]]]", TOKEN)),
]


@pytest.mark.parametrize(("prompts", "message"), IN_LISTS, ids=brief)
def test_one_of_many(busy: LLM, refused: Any, prompts: Any, message: str) -> None:
    with refused(message):
        busy.generate(prompts, GREEDY)


ACCEPTED: list[Any] = [
    "abc",
    ["abc"],
    [1, 2],
    (1, 2),
    [[1, 2]],
    {"prompt": "abc"},
    {"prompt_token_ids": (1, 2)},
    [{"prompt": "abc"}],
    range(3),
    [range(3)],
    np.array([1, 2]),
    [np.array([1, 2])],
    [np.int64(3), 1],
    torch.tensor([1, 2]),
    array.array("i", [1, 2]),
    {"prompt_token_ids": np.array([1, 2])},
    "a\0b",
]


@pytest.mark.parametrize("prompts", ACCEPTED, ids=brief)
def test_what_is_accepted(idle: LLM, prompts: Any) -> None:
    (output,) = idle.generate(prompts, GREEDY)
    assert len(output.outputs[0].token_ids) == 4


def test_nothing_asked_is_nothing_given(idle: LLM) -> None:
    assert idle.generate([], GREEDY) == []


def test_the_longest_prompt_still_draws_one_token(idle: LLM) -> None:
    (output,) = idle.generate([[5] * (LONGEST - 1)], SamplingParams(max_tokens=10, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


# --- sampling parameters beside a prompt --------------------------------------------------------------------------

PARAMS: list[tuple[Any, str]] = [
    ({"temperature": 0}, "{'temperature': 0}"),
    ({}, "{}"),
    (0, "0"),
    (5, "5"),
    (False, "False"),
    ("x", "'x'"),
    (b"x", "b'x'"),
    (SamplingParams, "<class 'bateleur.runner.sampling_params.SamplingParams'>"),
    ({1}, "{1}"),
]


@pytest.mark.parametrize(("params", "shown"), PARAMS, ids=brief)
def test_what_is_no_sampling_params(busy: LLM, refused: Any, params: Any, shown: str) -> None:
    with refused(must("sampling_params", shown, "SamplingParams, or a list of them")):
        busy.generate("x", params)
    with refused(must("sampling_params", shown, "SamplingParams")):
        busy.add_request("x", params)


LISTS_OF_PARAMS: list[tuple[Any, str]] = [
    ([GREEDY, None], must("sampling_params[1]", "None", "SamplingParams")),
    ([{}], must("sampling_params[0]", "{}", "SamplingParams")),
    ([[GREEDY]], must("sampling_params[0]", in_words([GREEDY]), "SamplingParams")),
    (
        [SamplingParams],
        must("sampling_params[0]", "<class 'bateleur.runner.sampling_params.SamplingParams'>", "SamplingParams"),
    ),
    ([], "sampling_params has 0 entries for 1 prompts"),
    ([GREEDY, GREEDY], "sampling_params has 2 entries for 1 prompts"),
]


@pytest.mark.parametrize(("params", "message"), LISTS_OF_PARAMS, ids=brief)
def test_lists_of_sampling_params(busy: LLM, refused: Any, params: Any, message: str) -> None:
    with refused(message):
        busy.generate("x", params)
    with refused(message):
        busy.stream(["x"], params)


# What only the model can tell.
WITH_THE_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds 101; ids must be in [0, {VOCAB})"),
    ({"stop_token_ids": [3, 10**30]}, f"stop_token_ids holds {10**30}; ids must be in [0, {VOCAB})"),
    ({"logit_bias": {VOCAB: 1, 3: 1, 500: 1}}, f"logit_bias holds 101, 500; ids must be in [0, {VOCAB})"),
    ({"logit_bias": {VOCAB: 1}}, f"logit_bias holds 101; ids must be in [0, {VOCAB})"),
    ({"logit_bias": {str(10**18): 1}}, f"logit_bias holds {10**18}; ids must be in [0, {VOCAB})"),
    ({"allowed_token_ids": [5, VOCAB]}, f"allowed_token_ids holds 101; ids must be in [0, {VOCAB})"),
    ({"logprobs": VOCAB + 1}, f"logprobs is 102; the vocabulary has {VOCAB} tokens"),
    ({"prompt_logprobs": VOCAB + 1}, f"prompt_logprobs is 102; the vocabulary has {VOCAB} tokens"),
    ({"logprobs": 10**30}, f"logprobs is {10**30}; the vocabulary has {VOCAB} tokens"),
    (
        {"min_tokens": 3, "stop_token_ids": list(range(VOCAB))},
        "min_tokens is 3; it must be 0 where every token ends the request",
    ),
]


@pytest.mark.parametrize(("params", "message"), WITH_THE_MODEL, ids=brief)
def test_params_that_do_not_fit_the_model(busy: LLM, refused: Any, params: dict[str, Any], message: str) -> None:
    with refused(message):
        busy.add_request("x", SamplingParams(**params))
    with refused(f"prompts[1]: {message}"):
        busy.generate(["x", "x"], [GREEDY, SamplingParams(**params)])


EXTREMES: list[dict[str, Any]] = [
    {"min_tokens": 10**18, "max_tokens": None},
    {"max_tokens": 10**30},
    {"top_k": 10**30},
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"min_p": 1e-320},
    {"top_p": 1e-320},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"logprobs": VOCAB, "max_tokens": 1},
    {"stop": ["x" * 16] * 256},
]


@pytest.mark.parametrize("params", EXTREMES, ids=brief)
def test_extremes_run(idle: LLM, params: dict[str, Any]) -> None:
    (output,) = idle.generate("xy", SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | params)))
    assert output.outputs[0].finish_reason == "length"


# --- ids and switches ---------------------------------------------------------------------------------------------

NAMES: list[tuple[Any, str]] = [
    *(
        (value, f"request_id is {value!r}; it must be text that is not empty")
        for value in ("", 5, [1], True, b"x", 1.5, {})
    ),
    ("\ud800", r"request_id holds '\ud800' at position 0, half of a surrogate pair"),
]


@pytest.mark.parametrize(("name", "message"), NAMES, ids=brief)
def test_request_ids(busy: LLM, refused: Any, name: Any, message: str) -> None:
    with refused(message):
        busy.add_request("x", GREEDY, request_id=name)
    with refused(message):
        busy.abort(name)


def test_ids_that_are_here_and_that_are_not(busy: LLM, refused: Any) -> None:
    (running,) = busy.engine.requests
    with refused(f"request_id is '{running}'; a request of that id is already waiting or running"):
        busy.add_request("x", GREEDY, request_id=running)
    twice = busy.prepare("x", GREEDY, request_id="twice")
    with refused("request_id is 'twice'; a request of that id is already waiting or running"):
        busy.add_prepared(twice, twice)
    assert list(busy.engine.requests) == [running]
    with refused("request_id is 'nobody'; no such request is waiting or running"):
        busy.abort("nobody")
    with refused(f"request_id is '{'n' * 37}...{'n' * 38}'; no such request is waiting or running"):
        busy.abort("n" * 100_000)
    with refused("request_id is None; it must be text that is not empty"):
        busy.abort(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["no", "true", 0, 1, None, []])
def test_switches(busy: LLM, refused: Any, value: Any) -> None:
    with refused(f"stream is {value!r}; it must be True or False"):
        busy.add_request("x", GREEDY, stream=value)
    with refused(f"use_tqdm is {value!r}; it must be True or False"):
        busy.generate("x", GREEDY, use_tqdm=value)


# --- outputs are the caller's -------------------------------------------------------------------------------------


def test_what_becomes_of_an_output_is_its_owners_business(idle: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    (expected,) = idle.generate([1, 2, 3], params)
    last = None
    for last in idle.stream([1, 2, 3], params):
        assert last.prompt_token_ids == [1, 2, 3]
        completion = last.outputs[0]
        told = (list(completion.token_ids), completion.cumulative_logprob, completion.text)
        last.prompt_token_ids.extend([9] * 99)
        completion.token_ids.clear()
        assert completion.logprobs is not None
        for place in completion.logprobs:
            place.clear()
        completion.logprobs.clear()
        last.outputs.clear()
    wanted = expected.outputs[0]
    assert told == (wanted.token_ids, wanted.cumulative_logprob, wanted.text)
