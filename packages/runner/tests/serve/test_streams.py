"""A stream joins to the whole reply, for random combinations of options."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from scripted_model import marker

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")
)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 100))]
TEXTS = ["default", "accents", "endless", "thinker", "weather", "two"]
COMMON: dict[str, list[Any]] = {
    "n": [1, 1, 2, 3],
    "prompt_logprobs": [None, None, 0, 2],
    "return_token_ids": [False, True],
    "return_tokens_as_token_ids": [False, True],
    "stop": [None, "o h", ["a b c a b c x", "never"], ["\u00e9", "four "], "Hello hello.!"],
    "include_stop_str_in_output": [False, True],
    "max_tokens": [40, 40, 1, 3, 7],
    "truncate_prompt_tokens": [None, None, -1, 3, 5],
    "truncation_side": ["left", "left", "right"],
    "skip_special_tokens": [True, False],
    "min_tokens": [0, 1],
}
"""Values of options that all APIs have."""


def drawn(random: Random, options: dict[str, list[Any]]) -> dict[str, Any]:
    """A body with a value of each option."""
    body = {name: random.choice(values) for name, values in options.items()}
    return {"temperature": 1, "seed": random.randrange(100)} | body


def streamed(client: Any, path: str, body: dict[str, Any], random: Random) -> tuple[list[Any], dict[str, Any]]:
    """The chunks of a stream with choices, and its usage. Continuous usage grows up to the last one."""
    continuous = random.random() < 0.5
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = client.stream(path, body | {"stream_options": options})
    assert last["choices"] == []
    if continuous:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == last["usage"]
    else:
        assert {str(chunk["usage"]) for chunk in chunks} == {"None"}
    return chunks, last["usage"]


def same_usage(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Usages are equal, apart from prefix cache hits."""
    for usage in (found, expected):
        usage.pop("prompt_tokens_details")
    assert found == expected


def same_values(found: Any, expected: Any) -> None:
    """Values are equal. Log probabilities may differ by rounding."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same_values(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same_values(*pair)
    else:
        assert found == expected


def parts_of(chunks: list[Any], index: int) -> list[dict[str, Any]]:
    """The parts of one choice. Only the last one has a finish reason."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert [part["stop_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return parts


def places_are_right(choice: dict[str, Any]) -> None:
    """Tokens are in the text at their offsets, apart from tokens of the end that the text leaves out."""
    text, known = choice["text"], choice["logprobs"]
    for token, offset in zip(known["tokens"], known["text_offset"], strict=True):
        if offset + len(token) <= len(text) and "\ufffd" not in token:
            assert text[offset:].startswith(token), (token, offset, text)


def joined_choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a choice as one choice, without its text or message."""
    joined = dict(parts[0])
    for part in parts[1:]:
        assert part.keys() == joined.keys() - {name for name in joined if name.startswith("prompt_")}
        for name in ("token_ids", "token_texts", "drafted"):
            if name in part:
                joined[name] += part[name]
        if (known := joined["logprobs"]) is not None:
            joined["logprobs"] = {name: known[name] + part["logprobs"][name] for name in part["logprobs"]}
        joined |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return joined


def completion_body(client: Any, random: Random) -> dict[str, Any]:
    """A random body for `/v1/completions`."""
    more = {"echo": [False, True], "logprobs": [None, 0, 1], "logprob_token_ids": [None, None, None, [5, 6]]}
    body = drawn(random, COMMON | more)
    if body["echo"] and random.random() < 0.3:
        body |= {"max_tokens": 0, "min_tokens": 0}
    encode = client.service.llm.llm.tokenizer.encode
    texts = [random.choice(["", "x", "\u00e9\u20ac", "a \u20ac"]) + marker(random.choice(TEXTS)) for _ in range(2)]
    prompts = [random.choice([text, list(encode(text))]) for text in texts]
    return body | {"prompt": random.choice([prompts, prompts[0]])}


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_completions_join_to_the_whole(scripted: Any, seed: int) -> None:
    random = Random(seed)
    body = completion_body(scripted, random)
    whole = scripted.ask(COMPLETIONS, body).json()
    chunks, usage = streamed(scripted, COMPLETIONS, body, random)
    same_usage(usage, whole["usage"])
    for index, expected in enumerate(whole["choices"]):
        parts = parts_of(chunks, index)
        same_values(joined_choice(parts) | {"text": "".join(part["text"] for part in parts)}, expected)
        assert (expected["prompt_logprobs"] is None) == (body["prompt_logprobs"] is None)
        if expected["logprobs"] is not None and not body["return_tokens_as_token_ids"]:
            places_are_right(expected)


def chat_body(random: Random) -> dict[str, Any]:
    """A random body for `/v1/chat/completions`."""
    more = {
        "top_logprobs": [None, 0, 2],
        "tools": [None, [CHAT_TOOL]],
        "enable_thinking": [None, True, False],
        "include_reasoning": [True, True, False],
        "thinking_token_budget": [None, None, None, 2],
        "echo": [False, True],
        "continue_final_message": [False, False, True],
    }
    body = drawn(random, COMMON | more)
    messages = [{"role": "user", "content": random.choice(TEXTS)}]
    if body["continue_final_message"]:
        messages.append({"role": "assistant", "content": "So"})
    return body | {"messages": messages, "logprobs": body["top_logprobs"] is not None}


def joined_message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The deltas of a choice as one message. Ids of calls are left out."""
    message: dict[str, Any] = {"role": "assistant", "refusal": None, "reasoning": None, "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        message["content"] += delta.get("content", "")
        if "reasoning" in delta:
            message["reasoning"] = (message["reasoning"] or "") + delta["reasoning"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message | {"reasoning_content": message["reasoning"]}


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_chats_join_to_the_whole(scripted: Any, seed: int) -> None:
    random = Random(seed)
    body = chat_body(random)
    whole = scripted.ask(CHAT, body).json()
    chunks, usage = streamed(scripted, CHAT, body, random)
    same_usage(usage, whole["usage"])
    names = {name for name in whole if name.startswith("prompt_")}
    same_values({name: chunks[0][name] for name in names}, {name: whole[name] for name in names})
    assert (whole["prompt_logprobs"] is None) == (body["prompt_logprobs"] is None)
    assert not any(names & chunk.keys() for chunk in chunks[1:])
    for index, expected in enumerate(whole["choices"]):
        parts = parts_of(chunks, index)
        assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)
        found = joined_choice(parts) | {"message": joined_message([part["delta"] for part in parts])}
        del found["delta"]
        for call in expected["message"].get("tool_calls", ()):
            del call["id"]
        same_values(found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_responses_join_to_the_whole(scripted: Any, seed: int) -> None:
    """The deltas join to the last event, and this is the whole response apart from ids and times."""
    random = Random(seed)
    body = chat_body(random)
    del body["thinking_token_budget"], body["logprobs"], body["prompt_logprobs"], body["messages"], body["tools"]
    body |= {
        "input": random.choice(TEXTS),
        "n": 1,
        "continue_final_message": False,
        "tools": random.choice([[], [TOOL]]),
    }
    whole = scripted.ask(RESPONSES, body).json()
    events = scripted.events(RESPONSES, body)
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                items.append(dict.fromkeys(("text", "arguments"), "") | {"logprobs": []})
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["text"] += event["delta"]
                items[-1]["logprobs"] += event.get("logprobs", [])
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
    last = events[-1]["response"]
    assert len(items) == len(last["output"])
    for found, item in zip(items, last["output"], strict=True):
        (part,) = item.get("content") or [{}]
        expected = {"text": part.get("text", ""), "logprobs": part.get("logprobs", [])}
        same_values(found, expected | {"arguments": item.get("arguments", "")})
    for response in (whole, last):
        for each in (response, *response["output"]):
            for name in ("id", "call_id", "created_at", "completed_at"):
                each.pop(name, None)
        response["usage"].pop("input_tokens_details")
    same_values(whole, last)


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_messages_join_to_the_whole(scripted: Any, seed: int) -> None:
    random = Random(seed)
    body = chat_body(random)
    tools = random.choice([None, [{"name": "weather", "input_schema": {"type": "object"}}]])
    for name in ("continue_final_message", "stop", "thinking_token_budget", "enable_thinking"):
        del body[name]
    stop = random.choice([None, ["o h"], ["\u00e9", "Hello hello.!"]])
    body |= {"n": 1, "tools": tools, "stop_sequences": stop}
    whole = scripted.ask(MESSAGES, body).json()
    events = scripted.events(MESSAGES, body)
    message = events[0]["message"]
    for event in events:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                (kind, text) = next(each for each in event["delta"].items() if each[0] != "type")
                if kind == "partial_json":
                    arguments += text
                else:
                    message["content"][-1][kind] += text
            case "content_block_stop" if message["content"][-1]["type"] == "tool_use":
                with suppress(ValueError):  # truncated
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for each in (whole, message):
        for block in (each, *each["content"]):
            block.pop("id", None)
        usage = each["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert message == whole
