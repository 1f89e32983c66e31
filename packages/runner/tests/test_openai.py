"""OpenAI's bodies and replies, without a server and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from bateleur.runner.serve.openai.replies import (
    Usage,
    chat_logprobs,
    chat_reply,
    completion_choice,
    completion_logprobs,
    completion_reply,
    error_body,
    reply_head,
    request_metrics,
)
from bateleur.runner.serve.openai.requests import ChatRequest, chat_request, completion_request
from bateleur.runner.serve.openai.tools import NamedTool, forced_schema, tool_choice
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, ToolCall
from bateleur.runner.utils.log_once import _logged

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Decode:
    """Every token is a character."""

    def __call__(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def name_of(self, token: int) -> str:
        return chr(token)

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])


decode: Any = Decode()
HEAD, CHAT = (reply_head("i", kind, "m") for kind in ("text_completion", "chat.completion"))


def output(text: str = "ab", logprobs: Any = None, **more: Any) -> RequestOutput:
    completion = CompletionOutput(0, text, [*map(ord, text)], None, logprobs, "stop", None)
    known = {"request_id": "r", "prompt": "xy", "prompt_token_ids": [120, 121], "finished": True}
    return RequestOutput(**known, outputs=[completion], num_cached_tokens=1, cache_miss="", num_preemptions=0, **more)


def replied(asked: ChatRequest, whole: RequestOutput, events: Sequence[Event] = ()) -> dict[str, Any]:
    """The reply of a chat. Its whole text is content unless events are given."""
    usage = Usage()
    usage.count(whole)
    text: list[Sequence[Event]] = [[Content(each.text), End("stop", None)] for each in whole.outputs]
    return chat_reply(asked, whole, [events] if events else text, CHAT, usage, decode)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", [{"prompt": "x"}]),
        (["x", "y"], [{"prompt": "x"}, {"prompt": "y"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert [*completion_request({"prompt": prompt}, {}).prompts] == prompts


def test_bodies_go_before_defaults_and_null_says_nothing() -> None:
    body = {"prompt": "x", "temperature": None, "top_p": 0.5, "user": 3, "seed": 4, "stream": True}
    asked = completion_request(body, {"temperature": 0.25, "top_p": 1, "max_tokens": 7})
    assert (asked.params.temperature, asked.params.top_p, asked.params.max_tokens) == (0.25, 0.5, 7)
    assert asked.stream
    assert not asked.include_usage
    assert completion_request({**body, "stream_options": {"include_usage": True}}, {}).include_usage
    assert completion_request({"prompt": "x"}, {}).params.max_tokens == 16
    assert chat_request({"messages": HELLO}, {}).params.max_tokens is None
    assert chat_request({"messages": HELLO, "max_completion_tokens": 3}, {}).params.max_tokens == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body is []; it must be an object"),
        ({}, "prompt is absent"),
        ({"prompt": "x", "request_id": ""}, "request_id is ''; it must be 1 to 200 printable characters"),
        ({"prompt": "x", "request_id": "a\nb"}, "request_id is 'a\\nb'; it must be 1 to 200"),
        ({"prompt": []}, "prompt is []; it must be text, token ids, or a list of these"),
        ({"prompt": ["x", 1]}, "prompt is ['x', 1]; it must be"),
        ({"prompt": [True]}, "prompt is [True]; it must be"),
        ({"prompt": {"a": 1}}, "prompt is {'a': 1}; it must be"),
        ({"prompt": "x", "wat": 1, "huh": 2}, "'huh', 'wat': no such field is known here"),
        ({"prompt": "x", **dict.fromkeys("abcdefghijk", 1)}, "'f', 'g', 'h', ...: no such field is known here"),
        ({"prompt": "x", "messages": HELLO}, "'messages': no such field"),
        ({"prompt": "x", "output_kind": 1}, "'output_kind': no such field"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'; it must be a finite number"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "echo": "yes"}, "echo is 'yes'; it must be True or False"),
        ({"prompt": "x", "suffix": "y"}, "suffix is 'y'; it must be absent"),
        ({"prompt": "x", "model": 3}, "model is 3; it must be text"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "it must be absent unless stream is true"),
        ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, "stream_options has 'a'; the known ones"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema is None"),
    ],
)
def test_a_wrong_body_is_refused_by_field(body: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        completion_request(body, {}, strict=True)
    assert message in str(error.value)


def test_an_echo_without_tokens_draws_one_and_leaves_it_out() -> None:
    asked = completion_request({"prompt": "xy", "echo": True, "max_tokens": 0}, {})
    assert asked.params.max_tokens == 1
    reply = completion_reply(asked, [output()], HEAD, decode)
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("xy", "length")
    assert reply["usage"]["completion_tokens"] == 0


def test_chats_become_what_templates_want() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    told = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    system, assistant, tool = chat_request({"messages": told}, {}).messages
    assert system == {"role": "developer", "content": "be\nkind"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert tool == told[2]
    assert call["function"]["arguments"] == '{"a": [1]}', "what was given is left as it is"
    more = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    asked = chat_request({"messages": HELLO, "continue_final_message": True, **more}, {})
    assert asked.template == {"enable_thinking": False, "thinking": True, "reasoning_effort": "low"}
    assert asked.continue_final_message
    assert not asked.add_generation_prompt


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max", "enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": False},
        ),
        ({}, {}),
    ],
)
def test_thinking_is_switched_by_names_for_the_template(body: dict[str, Any], names: dict[str, Any]) -> None:
    assert chat_request({"messages": HELLO, **body}, {}).template == names


SILENT: dict[str, Any] = {
    **{"modalities": ["text"], "use_beam_search": False, "length_penalty": 1.0, "vllm_xargs": {}},
    **{"verbosity": "low", "prediction": {"type": "content", "content": "x"}, "web_search_options": {}},
    **{"functions": [], "function_call": "none", "store": True, "audio": None, "stop": "", "seed": 1.0},
    **{"tools": [], "tool_choice": "auto", "stream_options": None, "add_special_tokens": False},
}


def test_fields_that_ask_for_what_happens_anyway_are_accepted() -> None:
    asked = chat_request({"messages": HELLO, "max_tokens": 5.0, **SILENT}, {}, strict=True)
    assert (asked.params.seed, asked.params.stop, asked.params.max_tokens) == (1, (), 5)
    assert (asked.tools, asked.tool_choice) == ((), "none")
    assert completion_request({"prompt": "x", "logprobs": True, "stop": ["", "a"]}, {}).params.stop == ("a",)
    assert completion_request({"prompt": "x", "logprobs": True}, {}).params.logprobs == 1
    assert completion_request({"prompt": "x", "logprobs": False}, {}).params.logprobs is None


def test_an_unknown_field_is_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    _logged.clear()
    for _ in range(2):
        chat_request({"messages": HELLO, "chat_id": 5, "num_ctx": 8}, {})
    assert [record.getMessage() for record in caplog.records] == [
        f"field '{name}' of a request is unknown and was ignored; --strict-fields refuses it"
        for name in ("chat_id", "num_ctx")
    ]


def test_tools_of_other_kinds_and_second_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    _logged.clear()
    second = {"type": "function", "function": {"name": "f", "description": "second"}}
    asked = chat_request({"messages": HELLO, "tools": [{"type": "web_search"}, TOOL, second]}, {})
    assert asked.tools == (TOOL,)
    assert len(caplog.records) == 2
    only = chat_request({"messages": HELLO, "tools": [{"type": "web_search"}], "tool_choice": "auto"}, {})
    assert (only.tools, only.tool_choice) == ((), "none")


def test_allowed_tools_are_a_choice_among_tools() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    asked = chat_request({"messages": HELLO, "tools": [TOOL, other], "tool_choice": choice}, {})
    assert (asked.tools, asked.tool_choice) == ((other,), "required")


def test_a_choice_of_tools() -> None:
    assert tool_choice(None, []) == "none"
    assert tool_choice(None, [TOOL]) == chat_request({"messages": HELLO, "tools": [TOOL]}, {}).tool_choice == "auto"
    assert tool_choice("required", [TOOL]) == "required"
    assert tool_choice({"type": "function", "function": {"name": "f"}}, [TOOL]) == NamedTool("f")


def test_a_forced_call_has_a_schema() -> None:
    defs = {"n": {"type": "integer"}}
    parameters = {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "elsewhere"}}, "$defs": defs}
    known = [TOOL, {"type": "function", "function": {"name": "g", "parameters": parameters}}]
    assert forced_schema(NamedTool("g"), known, parallel=True) == {"type": "object", **parameters}
    assert forced_schema("auto", known, parallel=True) is None
    schema = forced_schema("required", known, parallel=False)
    assert schema is not None
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    first, second = schema["items"]["anyOf"]
    assert (first["properties"]["name"], second["properties"]["name"]) == ({"const": "f"}, {"const": "g"})
    moved = second["properties"]["arguments"]["properties"]
    assert moved["b"]["$ref"] == "elsewhere"
    place: Any = schema
    for step in moved["a"]["$ref"].removeprefix("#/").split("/"):
        place = place[int(step) if isinstance(place, list) else step]
    assert place == {"type": "integer"}


def test_tools_that_are_too_deep_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="tools is nested too deeply"):
        forced_schema("required", [{"type": "function", "function": {"name": "f", "parameters": deep}}], parallel=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": []}, "messages is []; it must be at least one message"),
        ({"messages": "hello"}, "messages is 'hello'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is None"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content is None"),
        ({"reasoning_effort": 3}, "reasoning_effort is 3; it must be text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content[0].type is 'image_url'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0].function is None"),
        ({"top_logprobs": 2}, "top_logprobs is 2; it must be absent unless logprobs is true"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs is -2"),
        ({"tools": [{"type": "f"}]}, "tools[0].type is 'f'; it must be 'function'"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name is 'f'; it must be another"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "parameters is 3"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; it must be absent without tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is '{{ 1 }}'; it must be absent: clients may not send templates"),
        ({"modalities": ["text", "audio"]}, "modalities is ['text', 'audio']; it must be ['text']: answers are text"),
        ({"add_special_tokens": True}, "add_special_tokens is True; it must be False: the chat template adds them"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0; it must be 1 or 1.0: beam search is not supported"),
        ({"tools": {}}, "tools is {}; it must be a list of tools"),
        ({"tools": [TOOL], "tool_choice": "g"}, "tool_choice is 'g'; it must be none, auto, required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name is 'g'; it must be one of the tools: ['f']",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt is True"),
    ],
)
def test_a_wrong_chat_is_refused_by_field(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as error:
        chat_request({"messages": HELLO, **more}, {}, strict=True)
    assert message in str(error.value)


PLACES = [{97: Logprob(-1.0, 2, "a"), 98: Logprob(-0.5, 1, "b")}, {98: Logprob(-0.1, 1, "b")}]


def test_log_probabilities_have_two_forms() -> None:
    told = completion_logprobs([120, 97, 98], [None, *PLACES], 1, offset=5, beginning="x")
    assert told == {
        "tokens": ["x", "a", "b"],
        "token_logprobs": [None, -1.0, -0.1],
        "top_logprobs": [None, {"b": -0.5, "a": -1.0}, {"b": -0.1}],
        "text_offset": [5, 6, 7],
    }
    first, second = chat_logprobs([97, 98], PLACES, 1)["content"]
    assert (first["token"], first["bytes"]) == ("a", [97])
    assert first["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": [98]}]
    assert second["top_logprobs"] == [{"token": "b", "logprob": -0.1, "bytes": [98]}]
    never = completion_logprobs([1], [{1: Logprob(float("-inf"), 9, "n")}], 1)
    assert never["token_logprobs"] == [-9999.0]
    alike = {1: Logprob(-1.0, 1, "a"), 2: Logprob(-2.0, 2, "a")}
    assert completion_logprobs([2], [alike], 2)["top_logprobs"] == [{"a": -1.0}]


def test_log_probabilities_of_parts_of_characters_have_their_bytes() -> None:
    """A character is told with its last token, so that tokens join to the text and offsets are those of the text."""
    first, last = Logprob(-0.5, 1, "", b"\xc3"), Logprob(-0.1, 1, "\u00e9", b"\xa9")
    places = [{1: first, 3: Logprob(-2.0, 2, "", b"\xe2\x82")}, {2: last}, {4: Logprob(-1.0, 1, "!", b"!")}]
    told = completion_logprobs([1, 2, 4], places, 2)
    assert (told["tokens"], told["text_offset"]) == (["", "\u00e9", "!"], [0, 0, 1])
    assert told["top_logprobs"][0] == {"": -0.5, "bytes:\\xe2\\x82": -2.0}
    content = chat_logprobs([1, 2, 4], places, 2)["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == "\u00e9!"
    assert [each["bytes"] for each in content[0]["top_logprobs"]] == [[0xC3], [0xE2, 0x82]]


def test_replies_are_openais() -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    asked = completion_request({"prompt": "xy", "logprobs": 1, "return_token_ids": True}, {})
    outputs = [output(logprobs=PLACES), replace(output(logprobs=PLACES), request_id="s")]
    reply = completion_reply(asked, outputs, HEAD, decode)
    read = Completion.model_validate(reply)
    assert [choice.index for choice in read.choices] == [0, 1]
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (4, 4)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    chat = chat_request({"messages": HELLO, "logprobs": True, "top_logprobs": 1}, {})
    said = ChatCompletion.model_validate(replied(chat, output(logprobs=PLACES)))
    assert said.choices[0].message.content == "ab"
    assert said.choices[0].finish_reason == "stop"
    calls: list[Event] = [ToolCall(0, "1", "f"), Arguments(0, "{}"), End("tool_calls", None)]
    called = replied(chat, output(logprobs=PLACES), calls)
    assert ChatCompletion.model_validate(called).choices[0].finish_reason == "tool_calls"


def test_prompt_logprobs_are_reported_if_requested() -> None:
    known = {"prompt_logprobs": [None, {121: Logprob(-3.0, 5, "y")}]}
    asked = completion_request({"prompt": "xy", "prompt_logprobs": 0}, {})
    whole = output("a", **known)
    choice = completion_choice(asked, whole, whole.outputs[0], 0, decode)
    place = {"121": {"logprob": -3.0, "rank": 5, "decoded_token": "y"}}
    assert choice["prompt_logprobs"] == [None, place]
    assert "prompt_logprobs" not in completion_choice(asked, whole, whole.outputs[0], 0, decode, first=False)
    echoing = completion_request({"prompt": "xy", "echo": True, "logprobs": 0}, {})
    assert echoing.params.prompt_logprobs == 0
    whole.outputs[0].logprobs = PLACES[:1]
    choice = completion_choice(echoing, whole, whole.outputs[0], 0, decode)
    assert choice["logprobs"]["tokens"] == ["x", "y", "a"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -1.0]
    assert choice["prompt_logprobs"] is None
    chat = chat_request({"messages": HELLO, "prompt_logprobs": 0}, {})
    told = replied(chat, whole)
    assert told["prompt_logprobs"] == [None, place]


def test_a_chunk_tells_what_is_new() -> None:
    asked = completion_request({"prompt": "xy", "echo": True, "return_token_ids": True}, {})
    whole = output("a")
    first = completion_choice(asked, whole, whole.outputs[0], 0, decode)
    later = completion_choice(asked, whole, whole.outputs[0], 0, decode, first=False, offset=3)
    assert (first["text"], later["text"]) == ("xya", "a")
    assert first["prompt_token_texts"] == ["x", "y"]
    assert "prompt_token_ids" not in later
    assert later["token_texts"] == ["a"]


def test_an_error_has_one_form() -> None:
    assert error_body("no", param="n", code=400) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": 400}
    }


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters_takes_no_arguments(more: dict[str, Any]) -> None:
    known = [{"type": "function", "function": {"name": "ping", **more}}]
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert forced_schema(NamedTool("ping"), known, parallel=True) == nothing
    listed = forced_schema("required", known, parallel=True)
    assert listed is not None
    assert listed["items"]["anyOf"][0]["properties"]["arguments"] == nothing


def test_types_of_forced_calls_may_have_other_names() -> None:
    fields = {"type": {"type": "str"}, "n": {"type": ["int", "null"]}, "of": {"enum": [{"type": "int"}]}}
    known = [{"type": "function", "function": {"name": "f", "parameters": {"type": "dict", "properties": fields}}}]
    schema = forced_schema(NamedTool("f"), known, parallel=True)
    assert schema is not None
    assert (schema["type"], schema["properties"]) == (
        "object",
        {"type": {"type": "string"}, "n": {"type": ["integer", "null"]}, "of": {"enum": [{"type": "int"}]}},
    )


def test_an_answer_may_leave_out_its_reasoning_and_begin_with_the_last_message() -> None:
    asked = chat_request({"messages": HELLO, "echo": True, "include_reasoning": False, "documents": [{"a": 1}]}, {})
    assert (asked.echo, asked.include_reasoning, asked.template) == (True, False, {"documents": [{"a": 1}]})


def test_tokens_as_token_ids() -> None:
    told = completion_logprobs([97, 98], PLACES, 1, as_ids=True)
    assert told["tokens"] == ["token_id:97", "token_id:98"]
    assert told["top_logprobs"] == [{"token_id:98": -0.5, "token_id:97": -1.0}, {"token_id:98": -0.1}]
    assert told["text_offset"] == [0, 1]
    first, _ = chat_logprobs([97, 98], PLACES, 1, as_ids=True)["content"]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == ("token_id:97", [97], "token_id:98")
    asked = chat_request({"messages": HELLO, "logprobs": True, "return_tokens_as_token_ids": True}, {})
    reply = replied(asked, output(logprobs=PLACES))
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"


def test_fields_without_a_value_are_null() -> None:
    reply = replied(chat_request({"messages": HELLO}, {}), output())
    assert [reply[name] for name in ("prompt_logprobs", "prompt_token_ids")] == [None, None]
    message = reply["choices"][0]["message"]
    assert [message[name] for name in ("refusal", "reasoning", "reasoning_content")] == [None] * 3
    choice = completion_reply(completion_request({"prompt": "x"}, {}), [output()], HEAD, decode)["choices"][0]
    assert [choice[name] for name in ("prompt_logprobs", "prompt_token_ids")] == [None, None]


def test_request_metrics_are_in_milliseconds() -> None:
    times = RequestTimes(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=2.0, last_token_time=4.0)
    told = request_metrics(output("abcde", metrics=times))
    assert told == {
        "time_to_first_token_ms": 1000.0,
        "queue_time_ms": 500.0,
        "generation_time_ms": 2500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert request_metrics(output()) is None, "nothing was measured"
