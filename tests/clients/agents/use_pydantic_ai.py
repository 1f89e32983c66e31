"""The pydantic-ai library: chat completions, responses and messages."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Report(BaseModel):
    city: str
    degrees: int


openai = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
MODELS: list[Any] = [
    OpenAIChatModel("scripted", provider=openai),
    OpenAIResponsesModel("scripted", provider=openai),
    AnthropicModel("scripted", provider=AnthropicProvider(base_url=sys.argv[1], api_key="none")),
]
asked: list[str] = []


def weather(city: str) -> str:
    """Look at the weather."""
    asked.append(city)
    return "5 degrees"


async def main() -> None:
    for model in MODELS:
        agent = Agent(model, system_prompt="You are kind.", instructions="Be brief.", tools=[weather])
        print(type(model).__name__, (await agent.run("weather")).output)
        async with agent.run_stream("weather") as stream:
            print(f"streamed {type(model).__name__}", await stream.get_output())
        agent = Agent(model, output_type=Report, tools=[weather])
        report = (await agent.run("forced")).output
        assert report == Report(city="Oslo", degrees=5)
        print(f"structured {type(model).__name__} It is {report.degrees} degrees.")
    assert asked == ["Oslo"] * 9, asked


asyncio.run(main())
