"""Requests as popular clients send them: paths, headers, fields and histories."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Looks.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ASK = {"role": "user", "content": "weather"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5 degrees"}
CALLED, ANSWER, HELLO = "weather {'city': 'Oslo'}", "It is 5 degrees.", "Hello hello."
STAINLESS = {
    "user-agent": "OpenAI/JS 6.1.0",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "authorization": "Bearer none",
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CODEX = {
    "model": "scripted",
    "instructions": "You are Codex.",
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"session": "0199"},
}
CODEX_INPUT = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather"}]},
]
CLAUDE = {
    "model": "scripted",
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "weather", "description": "Looks.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_x"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
}
ANTHROPIC = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14",
}
TEXT_BLOCK = {"type": "text", "text": "weather", "cache_control": {"type": "ephemeral"}}
TABLE: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "Open WebUI": (
        CHAT,
        {"authorization": "Bearer ", "x-openwebui-user-name": "A%20B", "x-openwebui-user-role": "admin"},
        {
            "messages": [{"role": "system", "content": "Be kind."}, {**ASK, "content": [TEXT_BLOCK]}],
            "model": "scripted",
            "params": {},
            "tools": [TOOL],
            "tool_servers": [],
            "features": {"web_search": False},
            "variables": {"{{USER_NAME}}": "A"},
            "model_item": {"id": "scripted", "urlIdx": 0},
            "files": [],
            "session_id": "s",
            "chat_id": "c",
            "id": "i",
            "background_tasks": {"title_generation": True},
            "reasoning": {"effort": "low"},
            "user": {"name": "A", "id": "1", "email": "a@b", "role": "admin"},
            **USAGE,
        },
        CALLED,
    ),
    "Open WebUI, a title": (
        CHAT,
        {},
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "### Task:\nTitle"}],
            "stream": False,
            "max_completion_tokens": 1000,
            "metadata": {"task": "title_generation", "task_body": {"chat_id": None}},
        },
        HELLO,
    ),
    "LangChain": (
        CHAT,
        STAINLESS,
        {
            "messages": [
                ASK,
                {"content": None, "role": "assistant", "tool_calls": [CALL]},
                {**RESULT, "name": "weather"},
            ],
            "model": "scripted",
            "temperature": 0.7,
            "n": 1,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}],
            "parallel_tool_calls": False,
            "max_completion_tokens": 200,
            "frequency_penalty": None,
            "logprobs": False,
            "store": False,
            "service_tier": "auto",
            **USAGE,
        },
        ANSWER,
    ),
    "LangChain, VLLMOpenAI": (
        "/v1/completions",
        STAINLESS,
        {
            "model": "scripted",
            "prompt": ["<|im_start|><|default:0|>"],
            "temperature": 0.7,
            "max_tokens": 256,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 2,
            "best_of": 2,
            "logit_bias": {},
            "logprobs": None,
            "stream": False,
        },
        HELLO,
    ),
    "LlamaIndex": (
        CHAT,
        STAINLESS,
        {
            "messages": [
                {**ASK, "content": [{"type": "text", "text": "weather"}]},
                {"role": "assistant", "content": [], "tool_calls": [CALL]},
                {**RESULT, "content": [{"type": "text", "text": "5 degrees"}]},
            ],
            "model": "scripted",
            "stream": False,
            "temperature": 0.1,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        },
        ANSWER,
    ),
    "Continue": (
        CHAT,
        {"authorization": "Bearer none", "api-key": "none", "x-api-key": "none", "accept": "application/json"},
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": " ", "tool_calls": [CALL]},
                {"role": "tool", "content": "5 degrees", "tool_call_id": "call_1"},
            ],
            "model": "scripted",
            "max_tokens": 512,
            "stop": None,
            "prediction": None,
            "tool_choice": None,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}],
            "parallel_tool_calls": False,
            **USAGE,
        },
        ANSWER,
    ),
    "Continue, autocomplete": (
        "/v1/completions",
        {"authorization": "Bearer none"},
        {
            "prompt": "<|im_start|><|default:0|>",
            "model": "scripted",
            "max_tokens": 256,
            "temperature": 0.01,
            "top_p": None,
            "frequency_penalty": None,
            "stream": True,
            "stop": ["<fim_prefix>", "<|endoftext|>", "/src/", "#- coding: utf-8", "```", "\nfunction", "\nclass"],
        },
        HELLO,
    ),
    "Cline": (
        CHAT,
        {"http-referer": "https://cline.bot", "x-title": "Cline", "authorization": "Bearer none"},
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": "You are Cline."},
                {"role": "user", "content": [{"type": "text", "text": "weather"}]},
                {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
                RESULT,
                {"role": "user", "content": [{"type": "text", "text": "<environment_details>"}]},
            ],
            "temperature": 0,
            "tools": [TOOL],
            "tool_choice": "auto",
            "reasoning_effort": "medium",
            **USAGE,
        },
        ANSWER,
    ),
    "Aider": (
        CHAT,
        STAINLESS,
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Act as an expert."}]},
                {"role": "user", "content": "default"},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "Do it."},
                {"role": "system", "content": "# Rules"},
            ],
            "temperature": 0,
            "stream": True,
            "extra_headers": None,
        },
        HELLO,
    ),
    "AI SDK, openai-compatible": (
        CHAT,
        {"authorization": "Bearer none", "user-agent": "ai-sdk/openai-compatible/2.0.0"},
        {
            "model": "scripted",
            "max_tokens": 200,
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
                {**RESULT, "content": '{"degrees":5}'},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "verbosity": "low",
            **USAGE,
        },
        ANSWER,
    ),
    "Codex": (
        RESPONSES,
        {"accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "0199", "openai-beta": "x"},
        {**CODEX, "input": CODEX_INPUT},
        CALLED,
    ),
    "Codex, second turn": (
        RESPONSES,
        {},
        {
            **CODEX,
            "input": [
                *CODEX_INPUT,
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "I look."}],
                    "encrypted_content": None,
                },
                {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": {"type": "exec"}},
                {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}', "call_id": "c"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "5 degrees"}],
                },
                {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
            ],
        },
        ANSWER,
    ),
    "Anthropic, beta": (
        f"{MESSAGES}?beta=true",
        ANTHROPIC,
        {**CLAUDE, "messages": [{"role": "user", "content": [TEXT_BLOCK]}]},
        CALLED,
    ),
    "Anthropic, second turn": (
        f"{MESSAGES}?beta=true",
        ANTHROPIC,
        {
            **CLAUDE,
            "stream": False,
            "messages": [
                {"role": "user", "content": "weather"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I look.", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "5 degrees"}],
                            "is_error": False,
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                },
            ],
        },
        ANSWER,
    ),
}


def read(path: str, reply: Any) -> str:
    """The text of a reply, whole or streamed, or its call."""
    assert reply.status_code == 200, reply.text
    if "event-stream" not in reply.headers["content-type"]:
        return _whole(path, reply.json())
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        assert events[-1]["type"] == "response.completed"
        return _whole(path, events[-1]["response"])
    if path.startswith(MESSAGES):
        calls = [each["content_block"] for each in events if each["type"] == "content_block_start"]
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        names = [call["name"] for call in calls if call["type"] == "tool_use"]
        arguments = "".join(each.get("partial_json", "") for each in deltas)
        return _told(names, arguments, "".join(each.get("text", "") for each in deltas))
    choices = [choice for event in events for choice in event["choices"]]
    assert reply.text.endswith("data: [DONE]\n\n")
    if path != CHAT:
        return "".join(choice["text"] for choice in choices)
    calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    names = [each["name"] for each in calls if each.get("name")]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return _told(names, "".join(each.get("arguments") or "" for each in calls), content)


def _told(names: list[str], arguments: str, text: str) -> str:
    return f"{names[0]} {json.loads(arguments)}" if names else text


def _whole(path: str, reply: dict[str, Any]) -> str:
    if path == RESPONSES:
        for item in reply["output"]:
            if item["type"] == "function_call":
                return _told([item["name"]], item["arguments"], "")
        return "".join(
            part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]
        )
    if path.startswith(MESSAGES):
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return str(reply["choices"][-1]["message"]["content"] if path == CHAT else reply["choices"][-1]["text"])


@pytest.mark.parametrize("name", TABLE)
def test_a_client_is_answered(scripted: Any, name: str) -> None:
    path, headers, body, expected = TABLE[name]
    content = {"content": json.dumps(body), "headers": {"content-type": "application/json", **headers}}
    assert read(path, scripted.ask(path, **content)) == expected


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models?client_version=0.171.0", 200),
        ("GET", "/v1/models?limit=1000", 200),
        ("GET", "/v1/models/", 200),
        ("GET", "/v1/models/scripted", 200),
        ("HEAD", "/", 200),
        ("HEAD", "/v1/models", 200),
        ("GET", "/version", 200),
        ("GET", "/health", 200),
        ("GET", "/api/version", 404),
        ("GET", "/api/tags", 404),
        ("GET", "/v1/responses/resp_x?stream=true", 400),
        ("GET", "/v1/props", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/api/event_logging/batch", 404),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
def test_paths_that_clients_probe(scripted: Any, method: str, path: str, status: int) -> None:
    reply = scripted.ask(path, method=method)
    assert reply.status_code == status, reply.text
    if status in (404, 405):
        assert path in reply.json()["error"]["message"]


def test_models_have_the_fields_that_clients_read(scripted: Any) -> None:
    """OpenAI's, vLLM's `max_model_len` (Continue), and Anthropic's."""
    page = scripted.ask("/v1/models").json()
    (model,) = page["data"]
    assert (page["object"], model["object"], model["id"], model["max_model_len"]) == ("list", "model", "scripted", 1024)
    assert (model["type"], model["display_name"], model["created_at"][-1]) == ("model", "scripted", "Z")
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "scripted", "scripted")


def test_the_ai_sdk_sends_references_to_stored_items(scripted: Any) -> None:
    first = scripted.ask(RESPONSES, {"input": "weather", "tools": [{"type": "function", **FUNCTION}]}).json()
    reasoning, call = first["output"]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather"}]},
        {"type": "item_reference", "id": reasoning["id"]},
        {"type": "item_reference", "id": call["id"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5 degrees"},
    ]
    whole = [history[0], reasoning, call, history[3]]
    second, same = (scripted.ask(RESPONSES, {"input": each}).json() for each in (history, whole))
    assert _whole(RESPONSES, second) == ANSWER
    assert second["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    error = scripted.error(404, RESPONSES, {"input": [{"type": "item_reference", "id": "msg_x"}]})
    assert (error["param"], error["code"]) == ("input", "item_not_found")
