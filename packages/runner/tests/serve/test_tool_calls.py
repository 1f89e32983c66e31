"""Tool calls and reasoning over HTTP with the `openai` client and a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from bateleur.runner import AsyncLLM
from bateleur.runner.outputs import CompletionOutput, RequestOutput, RequestOutputKind

PATH = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
OPTIONS = {"enable_auto_tool_choice": True, "reasoning_parser": "think"}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.fixture(autouse=True)
def template(engine: AsyncLLM) -> Iterator[None]:
    tokenizer: Any = engine.llm.tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{% if think %}<think>\n{% endif %}"
    )
    yield
    tokenizer.chat_template = None


class Script:
    """Reader double: one request whose text arrives in pieces."""

    def __init__(self, prompt: str, pieces: list[str], stream: bool) -> None:
        self._prompt, self._kind = prompt, RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        self._pieces = pieces if stream else ["".join(pieces)]

    async def read(self) -> list[RequestOutput]:
        if not self._pieces:
            return []
        text = self._pieces.pop(0)
        reason: Any = None if self._pieces else "stop"
        completion = CompletionOutput(0, text, [1], None, None, reason, None, [False])
        return [RequestOutput("r-0", self._prompt, [1], [completion], reason is not None, 0, "", 0, kind=self._kind)]


Scripted = Callable[..., AsyncOpenAI]


@pytest.fixture
def scripted(make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """`scripted(text, **options)` creates a client of a server whose model writes this text in pieces of 5."""

    def make(text: str, **options: Any) -> AsyncOpenAI:
        client = make_client(**OPTIONS, **options)
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]

        async def submit(prompts: Any, asked: Any, reply_id: str) -> Script:
            return Script(prompts[0]["prompt"], pieces, asked.stream)

        monkeypatch.setattr(client.service, "submit", submit)
        monkeypatch.setattr(client.service.llm, "abort_unfinished", lambda reader: None)
        transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
        return AsyncOpenAI(api_key="-", base_url="http://here/v1", http_client=httpx.AsyncClient(transport=transport))

    return make


def whole(client: AsyncOpenAI, **more: Any) -> Any:
    reply = asyncio.run(client.chat.completions.create(model="bateleur", messages=HELLO, **more))
    return reply.choices[0]


def streamed(client: AsyncOpenAI, **more: Any) -> dict[str, Any]:
    """Join the deltas of a streamed message as clients do."""

    async def run() -> dict[str, Any]:
        told: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "reasons": []}
        stream = await client.chat.completions.create(model="bateleur", messages=HELLO, stream=True, **more)
        async for chunk in stream:
            for choice in chunk.choices:
                told["content"] += choice.delta.content or ""
                told["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    known = told["calls"].setdefault(
                        call.index, {"id": call.id, "name": call.function.name, "parts": []}
                    )
                    known["parts"].append(call.function.arguments)
                if choice.finish_reason:
                    told["reasons"].append(choice.finish_reason)
        return told

    return asyncio.run(run())


@pytest.mark.parametrize(("parser", "call"), [("hermes", HERMES), ("qwen3_coder", CODER)])
def test_calls_whole_and_streamed(scripted: Scripted, parser: str, call: str) -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me look.\n{call}\n{call}"
    choice = whole(scripted(text, tool_call_parser=parser), tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("Let me look.", "Hm.")
    assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [
        {"city": "Oslo", "days": 3}
    ] * 2
    told = streamed(scripted(text, tool_call_parser=parser), tools=TOOLS)
    assert (told["content"], told["reasoning"], told["reasons"]) == ("Let me look.", "Hm.", ["tool_calls"])
    assert [each["name"] for each in told["calls"].values()] == ["weather"] * 2
    assert len({each["id"] for each in told["calls"].values()}) == 2
    for each, known in zip(told["calls"].values(), choice.message.tool_calls, strict=True):
        assert "".join(each["parts"]) == known.function.arguments
        assert len(each["parts"]) > 3, "arguments come as they are written"


def test_what_is_no_call_is_content(scripted: Scripted) -> None:
    text = HERMES.replace("weather", "nobody")
    choice = whole(scripted(text, tool_call_parser="hermes"), tools=TOOLS)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    choice = whole(scripted(HERMES, tool_call_parser="hermes"), tools=TOOLS, tool_choice="none")
    assert choice.message.content == HERMES
    assert streamed(scripted(HERMES, tool_call_parser="hermes"))["content"] == HERMES
    told = streamed(scripted(HERMES * 2, tool_call_parser="hermes"), tools=TOOLS, parallel_tool_calls=False)
    assert (len(told["calls"]), told["content"]) == (1, HERMES)


def test_a_template_may_begin_the_reasoning(scripted: Scripted) -> None:
    begun = {"extra_body": {"chat_template_kwargs": {"think": True}}}
    choice = whole(scripted("Hm.\n</think>\nHi", tool_call_parser="hermes"), **begun)
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Hi")
    assert streamed(scripted("Hm. And", tool_call_parser="hermes"), **begun)["reasoning"] == "Hm. And"
    assert whole(scripted("Hm.", tool_call_parser="hermes")).message.content == "Hm."


def test_a_model_may_call_only_where_its_calls_are_read(client: Any) -> None:
    error = client.error(400, PATH, {"messages": HELLO, "tools": TOOLS})
    assert error["param"] == "tool_choice"
    assert "--tool-call-parser" in error["message"]
    assert (
        client.ask(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}).status_code == 200
    )


def test_a_forced_call_follows_the_schema_of_its_tool(client: Any) -> None:
    """A forced call is valid even from the shipped model, which never writes calls."""
    parameters = {"properties": {"days": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"enum": [3]}}}
    closed = {"required": ["days"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters | closed}}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 60, "temperature": 0}
    for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
        forced = body | {"tool_choice": choice, "parallel_tool_calls": False}
        told = client.ask(PATH, forced).json()["choices"][0]
        (call,) = told["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"days":3}'}
        assert told["finish_reason"] == "tool_calls"
        parts = [chunk["choices"][0]["delta"] for chunk in client.stream(PATH, forced)]
        calls = [each["function"]["arguments"] for part in parts for each in part.get("tool_calls", ())]
        assert "".join(calls) == call["function"]["arguments"]
        assert not any(part.get("content") for part in parts)


def test_invalid_tools_are_rejected(scripted: Scripted) -> None:
    with pytest.raises(BadRequestError, match=r"tools\[0\]\.function"):
        whole(scripted("", tool_call_parser="hermes"), tools=[{"type": "function"}])
