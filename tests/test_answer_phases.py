"""Grammars of whole answers: reasoning is free text; tool calls and content follow what the request asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, RequestOutput
from bateleur.runner.outputs import CompletionOutput
from bateleur.runner.serve.openai.requests import chat_request
from bateleur.runner.serve.parsers.chat_format import ChatFormat, PreparedChat
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Reasoning, ToolCall, merged
from bateleur.runner.serve.parsers.options import ParserOptions
from scripted_model import EOS, TAGS, write_scripted_model

pytest.importorskip("llguidance")

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBER}}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hot": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Mapping[str, Any] | None = None, *, strict: bool = False) -> dict[str, Any]:
    function = {"name": name, "strict": strict, **({} if parameters is None else {"parameters": parameters})}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", CITY), tool("ping")]
STRICT = [tool("weather", CITY, strict=True), tool("ping")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NUMBERED = '{"n": 5}'
TEXTS: dict[str, Any] = {
    "answer": "Hm, is it {?\n</think>\n\n" + NUMBERED,
    "quoted": ("The tag is '", "</", "think", ">'. Hm.", "</think>", NUMBERED, EOS),
    "free": "I think.\n</think>\n\nIt is five.",
    "plain": NUMBERED,
    "begins": f"<think>\nHm.\n</think>\n\n{NUMBERED}",
    "twice": "a\n</think>b</think>c",
    "call": f"I look.\n</think>\n\n{CALL}",
    "calls": f"I look.\n</think>\n\n{CALL}\n{CALL}",
    "unclosed": f"I look.\n{CALL}",
    "drafted": f"Maybe {CALL} or not.\n</think>\n\n{NUMBERED}",
    "forced": 'So.\n</think>\n\n[{"name":"ping","arguments":{}}]',
    "named": 'So.\n</think>\n\n{"city":"Oslo"}',
    "invents": 'So.\n</think>\n\n[{"name":"ping","arguments":{"x":1}}]',
    "strict": f"I look.\n</think>\n\nNow: {CALL.replace('Oslo', 'Rome')} Then.",
    "loose": 'Hm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"town": 5}}\n</tool_call>',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("phases"), TEXTS, tags={**TAGS, "<|im_tag|>": True})


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", max_model_len=512)


def asked(llm: LLM, name: str, parser: str = "hermes", **body: Any) -> tuple[PreparedChat, list[int]]:
    """The chat turn of a request, and its prompt."""
    reasons = {"chat_template_kwargs": {"enable_thinking": body.pop("enable_thinking", True)}}
    if reasons["chat_template_kwargs"]["enable_thinking"] is None:
        reasons = {}
    message = {"role": "user", "content": name}
    request = chat_request({"messages": [message], "temperature": 1, "seed": 7, **reasons, **body}, {})
    prompt = request.prompt_for(llm.tokenizer)
    options = ParserOptions(tool_call_parser=parser, reasoning_parser="think")
    turn = ChatFormat(options, llm.tokenizer).prepare(request, prompt)
    return turn, list(prompt["prompt_token_ids"])


def read(turn: PreparedChat, done: CompletionOutput) -> list[Any]:
    """Reasoning in sets, content unchanged, calls as pairs, and the finish reason last."""
    found: list[Any] = []
    for event in merged(turn.reader().read(done)):
        match event:
            case Reasoning(text):
                found.append({text})
            case Content(text):
                found.append(text)
            case ToolCall(_, _, name):
                found.append([name, ""])
            case Arguments(_, text):
                found[-1][1] += text
            case End(reason, _):
                found.append(reason)
    return found


def answer(llm: LLM, name: str, **body: Any) -> list[Any]:
    turn, prompt = asked(llm, name, **body)
    (output,) = llm.generate({"prompt_token_ids": prompt}, turn.params)
    return read(turn, output.outputs[0])


CALLED = ["weather", '{"city": "Oslo"}']
AUTO = {"response_format": FORMAT, "tools": TOOLS}
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("answer", {"response_format": FORMAT}, [{"Hm, is it {?"}, NUMBERED, "stop"]),
    ("quoted", {"response_format": FORMAT}, [{"The tag is '</think>'. Hm."}, NUMBERED, "stop"]),
    ("answer", {"response_format": {"type": "json_object"}}, [{"Hm, is it {?"}, NUMBERED, "stop"]),
    ("free", {"structured_outputs": {"regex": "It is [a-z]+\\."}}, [{"I think."}, "It is five.", "stop"]),
    ("free", {"structured_outputs": {"choice": ["It is five.", "x"]}}, [{"I think."}, "It is five.", "stop"]),
    (
        "free",
        {"structured_outputs": {"grammar": 'start: "It is " word "."\nword: /[a-z]+/'}},
        [{"I think."}, "It is five.", "stop"],
    ),
    ("plain", {"response_format": FORMAT, "enable_thinking": False}, [NUMBERED, "stop"]),
    ("answer", AUTO, [{"Hm, is it {?"}, NUMBERED, "stop"]),
    ("call", AUTO, [{"I look."}, CALLED, "tool_calls"]),
    ("calls", AUTO, [{"I look."}, CALLED, CALLED, "tool_calls"]),
    ("unclosed", AUTO, [{"I look."}, CALLED, "tool_calls"]),
    ("drafted", AUTO, [{f"Maybe {CALL} or not."}, NUMBERED, "stop"]),
    ("forced", {"tools": TOOLS, "tool_choice": "required"}, [{"So."}, ["ping", "{}"], "tool_calls"]),
    (
        "named",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        [{"So."}, ["weather", '{"city":"Oslo"}'], "tool_calls"],
    ),
    ("forced", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 8}, [{"So."}, ["ping", ""], "length"]),
    (
        "named",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 5},
        [{"So."}, ["weather", '{"city":"O'], "length"],
    ),
    ("strict", {"tools": STRICT}, [{"I look."}, "Now:", ["weather", '{"city": "Rome"}'], " Then.", "tool_calls"]),
    ("free", {"tools": STRICT}, [{"I think."}, "It is five.", "stop"]),
    ("loose", {"tools": TOOLS}, [{"Hm."}, ["weather", '{"town": 5}'], "tool_calls"]),
]


@pytest.mark.parametrize(("name", "body", "found"), CASES)
def test_reasoning_is_free_and_the_answer_is_not(llm: LLM, name: str, body: dict[str, Any], found: list[Any]) -> None:
    assert answer(llm, name, **body) == found


def test_an_answer_that_does_not_follow_is_made_to(llm: LLM) -> None:
    """The grammar must force the answer: without it the model writes something else."""
    reasoning, said, _ = answer(llm, "free", structured_outputs={"choice": ["[5]", "[six]"]})
    assert (reasoning, said in ("[5]", "[six]")) == ({"I think."}, True)
    _, (called, arguments), _ = answer(llm, "invents", tools=TOOLS, tool_choice="required", max_tokens=60)
    assert (called, arguments) == ("ping", "{}"), "a tool without parameters takes no arguments"
    _, (called, arguments), _ = answer(llm, "loose", tools=STRICT, max_tokens=60)
    assert called == "weather"
    assert "town" not in arguments
    assert re.match(r'\{\s*"c', arguments)


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}])
def test_no_reasoning_comes_before_an_answer_if_it_is_off(llm: LLM, off: dict[str, Any]) -> None:
    """With reasoning off, the model must not begin with it, although it does when reasoning is on."""
    begun = {"response_format": FORMAT, "enable_thinking": None, "max_tokens": 40}
    assert answer(llm, "begins", **begun) == [{"Hm."}, NUMBERED, "stop"]
    said, _ = answer(llm, "begins", **begun, chat_template_kwargs=off)
    assert said.startswith("{")


# --- tags that are special tokens ---------------------------------------------------------------------------------

WITHOUT_GRAMMAR: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("free", {}, [{"I think."}, "It is five.", "stop"]),
    ("free", {"tools": TOOLS}, [{"I think."}, "It is five.", "stop"]),
    ("free", {"tools": TOOLS, "tool_choice": "none"}, [{"I think."}, "It is five.", "stop"]),
    ("free", {"skip_special_tokens": False}, [{"I think."}, "It is five.", "stop"]),
    ("quoted", {}, [{"The tag is '</think>'. Hm."}, NUMBERED, "stop"]),
    ("twice", {}, [{"a"}, "bc", "stop"]),
    ("call", {"tools": TOOLS}, [{"I look."}, CALLED, "tool_calls"]),
    ("unclosed", {"tools": TOOLS}, [{"I look."}, CALLED, "tool_calls"]),
    ("drafted", {"tools": TOOLS}, [{f"Maybe {CALL} or not."}, NUMBERED, "stop"]),
    ("call", {"tools": TOOLS, "max_tokens": 12}, [{"I look."}, ["weather", ""], "length"]),
]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def tagged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("tagged")
    write_scripted_model(folder, TEXTS, tags=dict.fromkeys(TAGS, request.param))
    return LLM(folder, device="cpu", max_model_len=512)


@pytest.mark.parametrize(("name", "body", "found"), WITHOUT_GRAMMAR)
def test_tags_are_known_by_their_tokens(tagged: LLM, name: str, body: dict[str, Any], found: list[Any]) -> None:
    """The result must not depend on whether special tokens are shown."""
    assert answer(tagged, name, **body) == found


@pytest.mark.parametrize(("name", "body", "found"), CASES)
def test_grammars_know_special_tags(tagged: LLM, name: str, body: dict[str, Any], found: list[Any]) -> None:
    assert answer(tagged, name, **body) == found


# --- the same tokens, however it runs -----------------------------------------------------------------------------


def run(llm: LLM, n: int = 1) -> list[RequestOutput]:
    turns = [asked(llm, name, n=n, **body) for name, body, _ in CASES]
    prompts = [{"prompt_token_ids": prompt} for _, prompt in turns]
    return llm.generate(prompts, [turn.params for turn, _ in turns])


ENGINES: dict[str, dict[str, Any]] = {
    "drafts": {"draft": "ngram", "num_speculative_tokens": 3},
    "drafts and shared prefixes": {
        **{"draft": "ngram", "num_speculative_tokens": 3, "enable_prefix_caching": True, "block_size": 8}
    },
    "preempted": {"max_num_seqs": 6, "block_size": 8, "enable_prefix_caching": True, "max_model_len": 128},
    "in chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "ahead": {"async_scheduling": True},
    "at once": {"async_scheduling": False},
    "on two ranks": {"tensor_parallel_size": 2, "draft": "ngram", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in run(llm)]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_the_same(folder: Path, alone: list[tuple[int, ...]], sized: Callable[..., LLM], name: str) -> None:
    settings = {"device": "cpu", "max_model_len": 512, **ENGINES[name]}
    llm = sized(partial(LLM, folder), 20, **settings) if name == "preempted" else LLM(folder, **settings)
    for output, expected in zip(run(llm, n=2), alone, strict=True):
        assert [tuple(each.token_ids) for each in output.outputs] == [expected, expected]
    stats = llm.get_metrics()
    assert (stats.num_preemptions > 0) == (name == "preempted")
    if name.startswith("drafts"):
        assert stats.acceptance.kept[0] > 0
