"""`/v1/responses`: conversion of items; streamed events join to the whole response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from bateleur.runner.serve.responses import routes
from bateleur.runner.serve.responses.body import ResponsesBody, chat_body, messages_of
from bateleur.runner.serve.responses.routes import ResponseStore

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'}


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_response_has_items(scripted: Any) -> None:
    response = scripted.ask(PATH, {"input": "weather", "tools": [TOOL], "metadata": {"a": "b"}}).json()
    reasoning, call = response["output"]
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "scripted")
    assert [part["text"] for part in reasoning["content"]] == ["I look."]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Oslo"}')
    assert {reasoning["status"], call["status"]} == {"completed"}
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 5  # <think>, two of text, newline, </think>
    assert response["metadata"] == {"a": "b"}


def test_the_types_are_those_of_the_openai_client(scripted: Any) -> None:
    async def run() -> None:
        client = scripted.openai()
        first = await client.responses.create(model="scripted", input="weather", tools=[TOOL])
        call = first.output[-1]
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        history: Any = [{"role": "user", "content": "weather"}, *first.output, output]
        second = await client.responses.create(model="scripted", input=history, tools=[TOOL])
        assert second.output_text == "It is 5 degrees."
        third = await client.responses.create(
            model="scripted", input=[output], tools=[TOOL], previous_response_id=first.id
        )
        assert (third.output_text, third.previous_response_id) == ("It is 5 degrees.", first.id)
        assert third.usage.input_tokens == second.usage.input_tokens
        assert third.usage.input_tokens_details.cached_tokens > 0
        counted = await client.responses.input_tokens.count(model="scripted", input=history, tools=[TOOL])
        assert counted.input_tokens == second.usage.input_tokens
        inputs = await client.responses.input_items.list(third.id)
        assert [item.type for item in inputs.data] == ["function_call_output"]
        again = await client.responses.retrieve(third.id)
        assert again.output_text == third.output_text
        await client.responses.delete(third.id)

    asyncio.run(run())


@pytest.mark.parametrize("text", ["weather", "default", "patch"])
def test_events_join_to_the_response(scripted: Any, text: str) -> None:
    body = {"input": text, "tools": [TOOL, {"type": "custom", "name": "patch"}], "store": False}
    whole = scripted.ask(PATH, body).json()
    events = scripted.events(PATH, body)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    last = events[-1]
    assert last["type"] == "response.completed"

    def plain(items: Any) -> Any:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    assert plain(last["response"]["output"]) == plain(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        joined = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        text = item.get("arguments") or item.get("input") or item["content"][0]["text"]
        assert joined == text
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}


def test_every_kind_of_event_is_sent(scripted: Any) -> None:
    tools = [TOOL, {"type": "custom", "name": "patch"}]
    asked = [{"input": name, "tools": tools} for name in ("weather", "patch", "default")]
    asked.append({"input": "endless", "max_output_tokens": 3})
    kinds = {event["type"].removeprefix("response.") for body in asked for event in scripted.events(PATH, body)}
    assert kinds == {
        *("created", "in_progress", "completed", "incomplete", "output_item.added", "output_item.done"),
        *("content_part.added", "content_part.done", "output_text.delta", "output_text.done"),
        *("reasoning_text.delta", "reasoning_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
        *("custom_tool_call_input.delta", "custom_tool_call_input.done"),
    }


def test_a_limit_makes_it_incomplete(scripted: Any) -> None:
    response = scripted.ask(PATH, {"input": "endless", "max_output_tokens": 3}).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 3


def test_text_may_follow_a_schema(scripted: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = scripted.ask(
        PATH, {"input": "default", "text": {"format": form}, "max_output_tokens": 40, "temperature": 0}
    ).json()
    assert text_of(response).lstrip().startswith("{")
    assert response["text"]["format"] == form


def test_a_call_may_be_forced(scripted: Any) -> None:
    body = {
        "input": "default",
        "tools": [TOOL | {"strict": True}],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    response = scripted.ask(PATH, body | {"max_output_tokens": 60, "temperature": 0}).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]


def test_log_probabilities_are_reported_if_they_are_included(scripted: Any) -> None:
    body = {"input": "default", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = scripted.ask(PATH, body).json()["output"]
    (part,) = item["content"]
    assert "".join(each["token"] for each in part["logprobs"]).startswith(part["text"])
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {2}


def test_what_is_not_stored_is_not_found(make_scripted: Callable[..., Any]) -> None:
    client = make_scripted()
    gone = client.ask(PATH, {"input": "default", "store": False}).json()
    for path, method, body in [
        (f"{PATH}/{gone['id']}", "GET", None),
        (f"{PATH}/{gone['id']}", "DELETE", None),
        (f"{PATH}/{gone['id']}/cancel", "POST", None),
        (PATH, "POST", {"input": "default", "previous_response_id": gone["id"]}),
    ]:
        error = client.error(404, path, body, method=method)
        assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
    kept = client.ask(PATH, {"input": "default"}).json()
    assert client.ask(f"{PATH}/{kept['id']}").json() == kept
    assert client.ask(f"{PATH}/{kept['id']}", method="DELETE").json()["deleted"]
    assert client.ask(f"{PATH}/{kept['id']}").status_code == 404
    small = make_scripted(response_store_bytes=100)
    assert small.ask(f"{PATH}/{small.ask(PATH, {'input': 'default'}).json()['id']}").status_code == 404


def test_the_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(1000)
    for name in "abcdefgh":
        store.put({"id": name, "output": [{"id": f"msg_{name}", "text": "x" * 186}]}, [], None)
    assert [name for name in "abcdefgh" if store.get(name)] == ["e", "f", "g", "h"]
    assert [*store.outputs] == ["msg_e", "msg_f", "msg_g", "msg_h"]
    store.get("e")
    store.put({"id": "i", "output": []}, [{"text": "y" * 100}], store.get("f"))
    found = [name for name in "efghi" if store.get(name)]
    assert found == ["e", "f", "i"], "what was not used for longest goes; a continuation counts with what it continues"
    assert [item["text"][0] for item in store.get("i").items] == ["x", "y"]  # type: ignore[union-attr]
    store.put({"id": "huge", "output": [{"id": "msg_huge", "text": "z" * 2000}]}, [], None)
    assert store.get("huge") is None
    assert (store._num_bytes, store.outputs) == (0, {})


def test_a_cancelled_response_may_end_later(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may not read the stream, or a step may take long."""
    monkeypatch.setattr(routes, "_CANCEL_SECONDS", 0.01)
    responses = routes._Responses(scripted.service)
    responses._running["resp_a"] = routes._Running({"id": "resp_a", "status": "in_progress"})
    request: Any = None
    reply = asyncio.run(responses.cancel(request, "resp_a"))
    assert json.loads(bytes(reply.body)) == {"id": "resp_a", "status": "in_progress"}


def test_a_number_that_no_reply_can_repeat_is_refused(scripted: Any) -> None:
    """The reply and the store have the metadata as JSON, which has no infinity."""
    body = b'{"input": "default", "metadata": {"a": -1e999}}'
    reply = scripted.ask(PATH, content=body, headers={"content-type": "application/json"})
    assert reply.json()["error"]["message"] == "the body holds -1e999, which is too large a number"


def test_a_response_is_cancelled_between_its_reasoning_and_its_answer(
    scripted: Any, scripted_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, aborted, between = scripted_engine.submit, asyncio.Event(), asyncio.Event()
    abort = scripted_engine.abort

    async def abort_none(request_id: str) -> None:
        await abort(request_id)
        aborted.set()

    async def submit_later(*args: Any, **options: Any) -> Any:
        if options["continued"]:
            between.set()
            await aborted.wait()
        return await submit(*args, **options)

    monkeypatch.setattr(scripted_engine, "abort", abort_none)
    monkeypatch.setattr(scripted_engine, "submit", submit_later)

    async def run() -> None:
        client = scripted.openai()
        more = {"thinking_token_budget": 1, "enable_thinking": True, "ignore_eos": True, "max_output_tokens": 900}
        begun = await client.responses.create(model="scripted", input="x", background=True, extra_body=more)
        await asyncio.wait_for(between.wait(), 60)  # the reasoning has ended
        assert (await client.responses.cancel(begun.id)).status == "cancelled"

    asyncio.run(run())


def test_a_response_in_the_background_is_polled_and_cancelled(scripted: Any) -> None:
    async def run() -> None:
        client = scripted.openai()
        begun = await client.responses.create(model="scripted", input="default", background=True)
        assert begun.status == "queued"
        while (response := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
        assert (response.status, response.output_text) == ("completed", "Hello hello.")
        endless = {"ignore_eos": True, "max_output_tokens": 900}
        begun = await client.responses.create(model="scripted", input="x", background=True, extra_body=endless)
        await asyncio.sleep(0.05)
        response = await client.responses.cancel(begun.id)
        assert response.status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        longer = endless | {"max_output_tokens": 60}
        begun = await client.responses.create(model="scripted", input="x", background=True, extra_body=longer)
        await client.responses.delete(begun.id)
        await asyncio.sleep(0.5)  # the rest of the response
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "said", "code"),
    [
        ({}, "input is absent", "missing_required_parameter"),
        ({"input": 3}, "input is 3; it must be", None),
        ({"input": [{"content": "x"}]}, "input[0].type is None", None),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens is 0; it must be greater than", None),
        ({"input": "x", "temperature": 9e9, "top_p": 7}, "top_p is 7", None),
        ({"input": "x", "conversation": "c"}, "conversation is 'c'; it must be absent", None),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt is", None),
        ({"input": "x", "background": True, "stream": True}, "background is True", None),
        ({"input": "word " * 3000}, "prompt has", "context_length_exceeded"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'", None),
    ],
)
def test_what_is_refused(scripted: Any, body: dict[str, Any], said: str, code: str | None) -> None:
    error = scripted.error(400, PATH, body)
    assert error["message"].startswith(said)
    assert error["code"] == code
    assert scripted.error(404, PATH, {"input": "x", "model": "gpt"})["code"] == "model_not_found"


def test_items_of_one_turn_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]}
    custom = {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "*** Begin"}
    items = [
        {"role": "user", "content": "w"},
        reasoning,
        said,
        CALL,
        CALL,
        output,
        output,
        reasoning,
        custom,
        {"type": "web_search_call"},
    ]
    user, turn, first, second, last = messages_of(items)
    assert user == {"role": "user", "content": "w"}
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("Hm.", said["content"], 2)
    assert first == second == {"role": "tool", "tool_call_id": "c", "content": output["output"]}
    assert last["reasoning_content"] == "Hm."
    assert last["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "*** Begin"}'}
    assert [each["role"] for each in messages_of([said, said])] == ["assistant", "assistant"]


def test_fields_become_those_of_chat_completions() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    body = ResponsesBody.model_validate(
        {
            "input": "x",
            "instructions": "Be kind.",
            "reasoning": {"effort": "low"},
            "tools": [TOOL, {"type": "web_search"}],
            "tool_choice": allowed,
            "truncation": "auto",
            "top_k": 5,
        }
    )
    chat = chat_body(body, [{"role": "user", "content": "before"}])
    assert [each["content"] for each in chat["messages"]] == ["Be kind.", "before", "x"]
    assert (chat["reasoning_effort"], chat["top_k"], chat["truncate_prompt_tokens"]) == ("low", 5, -1)
    assert chat["tools"][0] == {"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}}
    assert chat["tool_choice"]["allowed_tools"]["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    assert chat["tools"][1] == {"type": "web_search"}


def test_input_items_come_in_pages(scripted: Any) -> None:
    given: Any = [{"role": "user", "content": str(i)} for i in range(25)]
    given[3]["id"] = "own"

    async def run() -> None:
        client = scripted.openai()
        response = await client.responses.create(model="scripted", input=given)
        page = await client.responses.input_items.list(response.id)
        assert [each.content for each in page.data] == [str(i) for i in range(24, 4, -1)]
        assert (page.has_more, page.first_id, page.last_id) == (True, "item_24", "item_5")
        page = await client.responses.input_items.list(response.id, order="asc", after="own", limit=2)
        assert [each.content for each in page.data] == ["4", "5"]
        assert [each.content async for each in page] == [str(i) for i in range(4, 25)]
        page = await client.responses.input_items.list(response.id, after="item_0")
        assert (page.data, page.has_more, page.first_id, page.last_id) == ([], False, None, None)
        for wrong in ("limit=0", "limit=101", "limit=x", "order=up", "after=item_99"):
            error = await asyncio.to_thread(scripted.error, 400, f"{PATH}/{response.id}/input_items?{wrong}")
            assert error["param"] == wrong.partition("=")[0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}, "strict": True}]}, "tools"),
    ],
)
def test_errors_name_the_fields_of_this_api(scripted: Any, body: dict[str, Any], param: str) -> None:
    error = scripted.error(400, PATH, {"input": "default", **body})
    assert error["param"] == param, error
    assert error["message"].startswith(param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_one_answer(scripted: Any, stream: bool) -> None:
    error = scripted.error(400, PATH, {"input": "default", "n": 2, "temperature": 1, "stream": stream})
    assert error["param"] == "n"
    assert error["message"] == "n is 2; it must be 1: a response has one answer"


@pytest.mark.parametrize("text", ["default", "accents", "thinker"])
@pytest.mark.parametrize("more", [{}, {"stop": "Hello hello.!"}, {"return_tokens_as_token_ids": True}])
def test_log_probabilities_are_those_of_all_tokens_of_the_answer(
    scripted: Any, text: str, more: dict[str, Any]
) -> None:
    """Also of parts of characters, of text that is held back, of white space and of the stop token."""
    chat = {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 0} | more
    (choice,) = scripted.ask("/v1/chat/completions", chat).json()["choices"]
    expected = [(each["token"], each["bytes"]) for each in choice["logprobs"]["content"]]
    if text == "thinker":
        expected = expected[8:]
    body = {"input": text, "top_logprobs": 0} | more
    parts = [scripted.ask(PATH, body).json()["output"][-1]["content"][0]["logprobs"]]
    events = scripted.events(PATH, body)
    parts.append([one for each in events if each["type"] == "response.output_text.delta" for one in each["logprobs"]])
    parts += [each["logprobs"] for each in events if each["type"] == "response.output_text.done"]
    assert len(parts) == 3
    for part in parts:
        assert [(each["token"], each["bytes"]) for each in part] == expected
