"""The litellm library: chat completions, responses and messages."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

URL = sys.argv[1]
litellm.suppress_debug_info = True
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ASKED = {"role": "user", "content": "weather"}


def chat(stream: bool) -> str:
    more: Any = {
        "model": "openai/scripted",
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "tools": [TOOL],
        "num_retries": 0,
    }

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return litellm.completion(messages=messages, **more).choices[0].message
        chunks = list(litellm.completion(messages=messages, stream=True, **more))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message  # type: ignore[union-attr]

    message = ask([ASKED])
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert message.reasoning_content == "I look."
    result = {"role": "tool", "tool_call_id": call.id, "content": "5 degrees"}
    return str(ask([ASKED, message.model_dump(), result]).content)


def responses() -> str:
    more: Any = {"model": "openai/scripted", "api_base": f"{URL}/v1", "api_key": "none"}
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    first = litellm.responses(input="weather", tools=tools, **more)
    call = first.output[-1]  # type: ignore[union-attr]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"}
    history = [ASKED, *(each.model_dump() for each in first.output), output]  # type: ignore[union-attr]
    second: Any = litellm.responses(input=history, tools=tools, **more)
    return str(second.output_text)


async def messages() -> str:
    more: Any = {"model": "anthropic/scripted", "api_base": URL, "api_key": "none", "max_tokens": 200}
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    first: Any = await litellm.anthropic.messages.acreate(messages=[ASKED], tools=tools, **more)
    call = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "5 degrees"}
    history = [ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second: Any = await litellm.anthropic.messages.acreate(messages=history, tools=tools, **more)
    return str(second["content"][-1]["text"])


print("chat", chat(stream=False))
print("streamed_chat", chat(stream=True))
print("responses", responses())
print("messages", asyncio.run(messages()))
