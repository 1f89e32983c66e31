"""The `openai` package's chats: messages, structured answers and calls of tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai", reason="needs the package openai")
pydantic = pytest.importorskip("pydantic", reason="needs the package pydantic")

MESSAGES: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def area(self):"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {
            "type": "object",
            "properties": {
                "shape": {"enum": ["circle", "square"]},
                "size": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["shape", "size"],
            "additionalProperties": False,
        },
    },
}


class Shape(pydantic.BaseModel):
    """What an answer is to be."""

    kind: Literal["circle", "square"]
    filled: bool


@pytest.fixture(scope="module")
def client(chat_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{chat_server}/v1", api_key="none", max_retries=0)


def test_an_answer_and_its_stream_are_one_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "shipped", "messages": MESSAGES, "max_completion_tokens": 30, "temperature": 0}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    message = reply.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert "".join(each.token for each in reply.choices[0].logprobs.content) == message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_a_conversation_finds_what_was_said_before(client: openai.OpenAI) -> None:
    messages = [MESSAGES[0] | {"content": "You write Python, and say little. " * 12}, MESSAGES[1]]
    asked: Any = {"model": "shipped", "max_completion_tokens": 20, "seed": 1}
    first = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "import os"}]
    usage = client.chat.completions.create(messages=messages, **asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 64


def test_an_answer_has_the_type_that_was_asked_for(client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.parse(
            model="shipped", messages=MESSAGES, response_format=Shape, max_completion_tokens=400, seed=seed
        )
        assert isinstance(reply.choices[0].message.parsed, Shape)


def test_a_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": "shipped", "messages": MESSAGES, "tools": [TOOL], "max_completion_tokens": 200}
    asked["tool_choice"] = {"type": "function", "function": {"name": "draw"}}
    reply = client.chat.completions.create(**asked, seed=3)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["draw"]
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["shape"] in ("circle", "square")
    assert 1 <= arguments["size"] <= 99
    streamed = ""
    for chunk in client.chat.completions.create(**asked, seed=3, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            streamed += call.function.arguments or ""
    assert json.loads(streamed) == arguments


def test_tools_without_a_choice_leave_it_to_the_model(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="shipped", messages=MESSAGES, tools=[TOOL], max_completion_tokens=10, temperature=0
    )
    message = reply.choices[0].message
    assert message.content or message.tool_calls
    without = client.chat.completions.create(
        model="shipped", messages=MESSAGES, max_completion_tokens=10, temperature=0
    )
    assert reply.usage is not None
    assert without.usage is not None
    assert reply.usage.prompt_tokens > without.usage.prompt_tokens, "the template shows the tools"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "image_url"),
    ],
)
def test_messages_that_are_none_are_refused(client: openai.OpenAI, messages: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(model="shipped", messages=messages)
