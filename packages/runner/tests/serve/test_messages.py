"""`/v1/messages`: conversion of content blocks; streamed events join to the whole message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bateleur.runner.serve.messages import MessagesBody, chat_body
from bateleur.runner.text.messages import checked_messages

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Looks.", "input_schema": {"type": "object"}}
WEATHER = {"role": "user", "content": "weather"}
ASKED: dict[str, Any] = {"max_tokens": 200, "messages": [WEATHER], "tools": [TOOL]}


def test_two_turns_of_a_tool(scripted: Any) -> None:
    first = scripted.ask(PATH, ASKED).json()
    thinking, call = first["content"]
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "scripted")
    assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
    assert thinking == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5"}]}
    history = [
        WEATHER,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?", "cache_control": {}}]},
    ]
    second = scripted.ask(PATH, ASKED | {"messages": history}).json()
    assert second["content"][1] == {"type": "text", "text": "It is 5 degrees."}
    assert second["stop_reason"] == "end_turn"
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 0
    counted = scripted.ask(f"{PATH}/count_tokens", {"messages": history, "tools": [TOOL]}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("text", ["weather", "default"])
def test_events_join_to_the_message(scripted: Any, text: str) -> None:
    body = ASKED | {"messages": [{"role": "user", "content": text}]}
    whole = scripted.ask(PATH, body).json()
    start, ping, *middle, delta, stop = scripted.events(PATH, body)
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    assert start["message"]["content"] == []
    assert start["message"]["usage"].keys() == whole["usage"].keys()
    assert delta["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for index, block in enumerate(whole["content"]):
        begin, *deltas, end = [event for event in middle if event["index"] == index]
        assert (begin["type"], end["type"]) == ("content_block_start", "content_block_stop")
        assert begin["content_block"]["type"] == block["type"]
        kinds = {event["delta"]["type"] for event in deltas}
        if block["type"] == "tool_use":
            assert kinds == {"input_json_delta"}
            assert "".join(event["delta"]["partial_json"] for event in deltas) == '{"city": "Oslo"}'
        elif block["type"] == "thinking":
            assert kinds == {"thinking_delta", "signature_delta"}
            assert "".join(event["delta"].get("thinking", "") for event in deltas) == block["thinking"]
        else:
            assert "".join(event["delta"]["text"] for event in deltas) == block["text"]


def test_how_it_stopped(scripted: Any) -> None:
    asked = {"max_tokens": 3, "messages": [{"role": "user", "content": "endless"}]}
    assert scripted.ask(PATH, asked).json()["stop_reason"] == "max_tokens"
    asked = {"stop_sequences": ["stop"], "messages": [{"role": "user", "content": "two"}]}
    message = scripted.ask(PATH, asked).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "stop")
    assert message["content"] == [{"type": "text", "text": "First.\n"}]


def test_all_thinking_of_a_past_message_is_read() -> None:
    """A model may think again after a text, and this server returns that as a further block."""
    blocks = [
        {"type": "thinking", "thinking": "First.", "signature": ""},
        {"type": "text", "text": "Well."},
        {"type": "thinking", "thinking": "Then.", "signature": ""},
    ]
    chat = read(messages=[WEATHER, {"role": "assistant", "content": blocks}, WEATHER])
    message = checked_messages(chat["messages"])[1]
    assert (message["reasoning_content"], message["content"]) == ("First.\nThen.", "Well.")
    message = checked_messages([{"role": "assistant", "content": blocks, "reasoning_content": "Given."}])[0]
    assert message["reasoning_content"] == "Given."


@pytest.mark.usefixtures("aborted_at_once")
def test_an_aborted_message_is_an_error(scripted: Any) -> None:
    """No stop reason means that: the answer would seem complete."""
    reply = scripted.ask(PATH, ASKED)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.usefixtures("aborted_at_once")
def test_the_stream_of_an_aborted_message_ends_with_an_error(scripted: Any) -> None:
    *_, last = scripted.events(PATH, ASKED)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


def test_the_prompt_of_a_begun_answer_is_counted_as_it_runs(scripted: Any) -> None:
    body = {"messages": [WEATHER, {"role": "assistant", "content": "It"}]}
    usage = scripted.ask(PATH, body | {"max_tokens": 3}).json()["usage"]
    counted = scripted.ask(f"{PATH}/count_tokens", body).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_errors_have_anthropics_form(make_scripted: Callable[..., Any]) -> None:
    client = make_scripted(api_key=["secret"])

    def refused(status: int, body: Any, **headers: str) -> dict[str, Any]:
        reply = client.ask(PATH, content=body, headers={"content-type": "application/json", **headers})
        assert reply.status_code == status, reply.text
        told = reply.json()
        assert (told["type"], told["error"].keys()) == ("error", {"type", "message"})
        error: dict[str, Any] = told["error"]
        return error

    key = {"x-api-key": "secret"}
    assert refused(401, b"{}")["type"] == "authentication_error"
    assert refused(401, b"{}", **{"x-api-key": "other"})["type"] == "authentication_error"
    assert refused(400, b"{}", **key)["message"] == "messages is absent; it is required"
    assert refused(404, b'{"messages": [{"role": "user", "content": "x"}], "model": "claude"}', **key)["type"] == (
        "not_found_error"
    )
    long = b'{"messages": [{"role": "user", "content": "' + b"x" * 5000 + b'"}]}'
    assert refused(400, long, **key)["message"].startswith("prompt is too long: prompt has")
    assert refused(413, b" " * (17 * 2**20), **key)["type"] == "request_too_large"
    reply = client.ask(PATH, content=b"{}", headers={"authorization": "Bearer secret"})
    assert reply.status_code == 415


def test_a_stored_conversation_is_refused_so_that_clients_send_all_of_it(scripted: Any) -> None:
    reply = scripted.ask(PATH, ASKED | {"thread": {"type": "create"}})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def read(**body: Any) -> dict[str, Any]:
    return chat_body(MessagesBody.model_validate({"messages": [WEATHER]} | body))


def test_blocks_become_messages() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "5", "is_error": True}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}}
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "read me"}}
    messages = [
        {"role": "user", "content": [image, document, {"type": "text", "text": "w"}]},
        {"role": "assistant", "content": [*thought, {"type": "text", "text": "I look."}, call, call | {"id": "u"}]},
        {"role": "user", "content": [result, result | {"tool_use_id": "u"}]},
    ]
    system, user, assistant, first, second = read(messages=messages, system=[{"type": "text", "text": "s"}])["messages"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "s"}]}
    assert user["content"] == [image, {"type": "text", "text": "read me"}, {"type": "text", "text": "w"}]
    assert assistant["content"] == [thought[0], {"type": "text", "text": "I look."}]
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert (first["tool_call_id"], second["tool_call_id"]) == ("t", "u")


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"max_tokens": 7}, {"max_completion_tokens": 7}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking_token_budget": 1024},
        ),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"messages": [WEATHER, {"role": "assistant", "content": "It is"}]},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"top_k": 5, "metadata": {"user_id": "u"}}, {"top_k": 5}),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "parameters": {"type": "object"}, "description": "Looks."},
                    },
                    {"type": "web_search_20250305", "name": "web_search"},
                ]
            },
        ),
    ],
)
def test_fields_become_those_of_chat_completions(body: dict[str, Any], fields: dict[str, Any]) -> None:
    chat = read(**body)
    assert {name: chat[name] for name in fields} == fields
    assert "metadata" not in chat


def test_thinking_is_switched(make_scripted: Callable[..., Any]) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}{{ '<think>' }}{% endif %}"
    client = make_scripted(chat_template=template)
    asked = {"messages": [WEATHER]}
    with_it = asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    path = f"{PATH}/count_tokens"
    counts = [client.ask(path, body).json()["input_tokens"] for body in (asked, with_it)]
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stop_sequences": ["\ud800"]}, "stop_sequences"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.content"),
    ],
)
def test_errors_name_the_fields_of_this_api(scripted: Any, body: dict[str, Any], name: str) -> None:
    reply = scripted.ask(PATH, ASKED | body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(name), reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_one_answer(scripted: Any, stream: bool) -> None:
    body = {"messages": [WEATHER], "max_tokens": 5, "temperature": 1, "stream": stream}
    assert scripted.ask(PATH, body | {"n": 1}).status_code == 200
    reply = scripted.ask(PATH, body | {"n": 2})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "n is 2; it must be 1: a message has one answer"
