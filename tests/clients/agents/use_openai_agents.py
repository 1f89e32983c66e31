"""The openai-agents library: a tool loop through responses and through chat completions."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Report(BaseModel):
    city: str
    degrees: int


client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Look at the weather.

    Args:
        city: The city.
    """
    asked.append(city)
    return "5 degrees"


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(
            name="helper", instructions="You are kind.", tools=[weather], model=kind("scripted", openai_client=client)
        )
        print(kind.__name__, (await Runner.run(agent, "weather")).final_output)
        stream = Runner.run_streamed(agent, "weather")
        kinds = {event.type async for event in stream.stream_events()}
        assert "raw_response_event" in kinds
        print(f"streamed {kind.__name__}", stream.final_output)
        agent = Agent(name="helper", tools=[weather], output_type=Report, model=kind("scripted", openai_client=client))
        report = (await Runner.run(agent, "study")).final_output
        assert report == Report(city="Oslo", degrees=5)
        print(f"structured {kind.__name__} It is {report.degrees} degrees.")
    assert asked == ["Oslo"] * 6, asked


asyncio.run(main())
