"""The langchain-openai library: chat completions and responses."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Report(BaseModel):
    """A report of the weather."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """Look at the weather."""
    assert city == "Oslo"
    return "5 degrees"


def loop(streamed: bool, **options: Any) -> str:
    model = ChatOpenAI(model="scripted", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, **options)
    able = model.bind_tools([weather])

    def ask(messages: list[Any]) -> Any:
        if not streamed:
            return able.invoke(messages)
        first, *rest = able.stream(messages)
        for each in rest:
            first += each
        return first

    history: list[Any] = [HumanMessage("weather")]
    message = ask(history)
    (call,) = message.tool_calls
    history += [message, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    return str(ask(history).text)


def structured(**options: Any) -> str:
    model = ChatOpenAI(model="scripted", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, **options)
    found = model.with_structured_output(Report, method="json_schema").invoke("report")
    assert found == Report(city="Oslo", degrees=5)
    return "It is 5 degrees."


for name, options in (("chat", {"verbosity": "low"}), ("responses", {"use_responses_api": True})):
    print(name, loop(False, **options))
    print(f"streamed_{name}", loop(True, **options))
    print(f"structured_{name}", structured(**options))
