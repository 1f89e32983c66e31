"""The openai library: responses and chat completions, with tools, streams and parsed answers."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


class Report(BaseModel):
    city: str
    degrees: int


class weather(BaseModel):
    city: str


def responses() -> str:
    first = client.responses.create(model="scripted", input="weather", tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"}
    return client.responses.create(
        model="scripted", input=[output], tools=[TOOL], previous_response_id=first.id
    ).output_text


def streamed_responses() -> str:
    history: list[Any] = [{"role": "user", "content": "weather"}]
    with client.responses.stream(model="scripted", input=history, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert "response.reasoning_text.delta" in kinds
    call = first.output[-1]
    assert call.type == "function_call"
    history += first.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"})
    with client.responses.stream(model="scripted", input=history, tools=[TOOL], store=False) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    return text


def parsed_response() -> str:
    found = client.responses.parse(model="scripted", input="report", text_format=Report).output_parsed
    assert found == Report(city="Oslo", degrees=5)
    return f"It is {found.degrees} degrees."


def chat() -> str:
    tool = pydantic_function_tool(weather)
    messages: list[Any] = [{"role": "user", "content": "weather"}]
    message = client.chat.completions.parse(model="scripted", messages=messages, tools=[tool]).choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == weather(city="Oslo")
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 degrees"}]
    return str(
        client.chat.completions.create(model="scripted", messages=messages, tools=[tool]).choices[0].message.content
    )


def streamed_chat() -> str:
    tool = pydantic_function_tool(weather)
    messages: list[Any] = [{"role": "user", "content": "weather"}]
    with client.chat.completions.stream(model="scripted", messages=messages, tools=[tool]) as stream:
        message = stream.until_done().get_final_completion().choices[0].message
    assert message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 degrees"}]
    with client.chat.completions.stream(model="scripted", messages=messages, tools=[tool]) as stream:
        return "".join(event.delta for event in stream if event.type == "content.delta")


def parsed_chat() -> str:
    messages: Any = [{"role": "user", "content": "report"}]
    choice = client.chat.completions.parse(model="scripted", messages=messages, response_format=Report).choices[0]
    assert choice.message.parsed == Report(city="Oslo", degrees=5)
    return "It is 5 degrees."


for trial in (responses, streamed_responses, parsed_response, chat, streamed_chat, parsed_chat):
    print(trial.__name__, trial())
