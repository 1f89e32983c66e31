"""Any value in any field of a body is accepted or raises a ValueError that names a field."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bateleur.runner import AsyncLLM
from bateleur.runner.serve import messages
from bateleur.runner.serve.body import validate
from bateleur.runner.serve.openai.requests import chat_request
from bateleur.runner.serve.responses import body as responses

VALUES: list[Any] = [
    *(None, True, 1, -1, 1.5, 10**30, "", "x", "\ud800\u00e9"),
    *([], [1], ["x"], [None], [[]], [{}], {}, {"a": 1}, {"type": "x"}, {"x": {"y": [1]}}),
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "bob"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}],
            "tool_calls": [CALL],
            "reasoning_content": "r",
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
        {"role": "user", "content": "and?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"1": 1},
}
RESPONSE = {
    "instructions": "i",
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"role": "user", "content": "x"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "patch", "description": "d", "format": {"definition": "start: x"}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}
MESSAGE = {
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": True,
                    "content": [{"type": "text", "text": "5"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["z"],
    "output_config": {"effort": "low"},
}
NAMES_A_FIELD = re.compile(r"(?:(?:a key|keys) of )?[a-z_]+[\w.\[\]']* (?:is|are|has|holds|must)\b")
READERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "chat": (CHAT, lambda body: body),
    "responses": (RESPONSE, lambda body: responses.chat_body(validate(responses.ResponsesBody, body), [])),
    "messages": (MESSAGE, lambda body: messages.chat_body(validate(messages.MessagesBody, body))),
}


def changed(body: Any) -> Iterator[Any]:
    """Yield the body with each field replaced by each of `VALUES`, and without each field."""
    for key in body if isinstance(body, dict) else range(len(body)):
        for value in VALUES:
            other = copy.copy(body)
            other[key] = value
            yield other
        shorter = copy.copy(body)
        del shorter[key]
        yield shorter
        if isinstance(body[key], dict | list):
            for inner in changed(body[key]):
                other = copy.copy(body)
                other[key] = inner
                yield other


@pytest.mark.parametrize("api", READERS)
def test_a_body_is_read_or_refused(api: str, scripted_engine: AsyncLLM) -> None:
    body, read = READERS[api]
    tokenizer = scripted_engine.llm.tokenizer
    num_read, refused = 0, list[str]()
    for each in changed(body):
        try:
            chat_request(read(copy.deepcopy(each)), {}).prompt_for(tokenizer)
            num_read += 1
        except ValueError as error:
            refused.append(str(error))
    assert [each for each in refused if not NAMES_A_FIELD.match(each)] == []
    assert min(num_read, len(refused)) > 400
