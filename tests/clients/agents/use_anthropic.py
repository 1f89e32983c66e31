"""The anthropic library: messages with tools, streams and token counts."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from anthropic import Anthropic, NotFoundError, beta_tool

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED: Any = {"role": "user", "content": "weather"}


def answered(message: Any) -> list[Any]:
    call = message.content[-1]
    assert (message.stop_reason, call.type, call.input) == ("tool_use", "tool_use", {"city": "Oslo"})
    assert (message.content[0].type, message.content[0].thinking) == ("thinking", "I look.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5 degrees"}
    return [ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]


def whole() -> str:
    more: Any = {"model": "scripted", "max_tokens": 200, "tools": [TOOL], "system": "You are kind."}
    history = answered(client.messages.create(messages=[ASKED], **more))
    message = client.messages.create(messages=history, **more)
    count = client.messages.count_tokens(messages=history, model="scripted", tools=[TOOL], system="You are kind.")
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return str(message.content[-1].text)


def streamed() -> str:
    more: Any = {"model": "scripted", "max_tokens": 200, "tools": [TOOL]}
    with client.messages.stream(messages=[ASKED], **more) as stream:
        history = answered(stream.get_final_message())
    with client.messages.stream(messages=history, **more) as stream:
        return "".join(stream.text_stream)


asked: list[str] = []


@beta_tool
def weather(city: str) -> str:
    """Look at the weather.

    Args:
        city: The city.
    """
    asked.append(city)
    return "5 degrees"


def runner() -> str:
    loop = client.beta.messages.tool_runner(model="scripted", max_tokens=200, tools=[weather], messages=[ASKED])
    message = loop.until_done()
    assert asked == ["Oslo"]
    return str(message.content[-1].text)


for trial in (whole, streamed, runner):
    print(trial.__name__, trial())
with suppress(NotFoundError):
    client.messages.create(model="claude", max_tokens=1, messages=[ASKED])
    raise SystemExit("a model that is not served was found")
