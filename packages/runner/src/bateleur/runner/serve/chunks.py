"""A reply in parts, in OpenAI's form of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from bateleur.runner.serve.openai.requests import Asked
from bateleur.runner.serve.usage import Usage


async def chunks(
    parts: AsyncGenerator[dict[str, Any], None], asked: Asked, head: dict[str, Any], usage: Usage
) -> AsyncGenerator[dict[str, Any], None]:
    """Every chunk, and the usage behind them if it is asked for.

    parts: fields of each chunk, `choices` and others. head: fields of every chunk. usage: is counted by `parts`.
    """
    async with aclosing(parts):
        async for part in parts:
            chunk = {**head, **part}
            if asked.include_usage:
                chunk["usage"] = usage.told() if asked.continuous_usage else None
            yield chunk
    if asked.include_usage:
        yield {**head, "choices": [], "usage": usage.told()}
