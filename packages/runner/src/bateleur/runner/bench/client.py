"""A client of a server that answers as OpenAI's does, on the standard library alone: one connection a request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bateleur.runner.errors import Unmeasured


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it, in seconds."""

    first: float
    """From the request to the first token."""
    per_token: float
    """Behind the first."""
    tokens: list[int]
    cached: int
    """Tokens of the prompt that the server says it had."""


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server for completions of token ids.

    url: http://host:port. model: what the server calls it. timeout: seconds that it may say nothing.
    """

    url: str
    model: str
    timeout: float = 600.0

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        """Exactly `tokens` tokens behind `prompt`, greedily, streamed. Unmeasured for any other reply, or none."""
        try:
            async with asyncio.timeout(self.timeout) as silence:
                return await self._ask(prompt, tokens, silence)
        except TimeoutError as error:
            raise Unmeasured(f"{self.url} says nothing; timeout is {self.timeout:g} seconds") from error
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unmeasured(f"{self.url} gave no reply that can be read: {error!r}"[:500]) from error

    async def _ask(self, prompt: list[int], tokens: int, silence: asyncio.Timeout) -> Answer:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        began, first, last, cached = time.perf_counter(), 0.0, 0.0, 0
        ids: list[int] = []
        async for chunk in self._chunks(json.dumps(body).encode()):
            silence.reschedule(asyncio.get_running_loop().time() + self.timeout)
            if "error" in chunk:
                raise Unmeasured(json.dumps(chunk)[:500])
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    ids += choice["token_ids"]
                    last = time.perf_counter()
                    first = first or last
        if len(ids) != tokens:
            raise Unmeasured(f"{len(ids)} tokens came of {tokens}")
        return Answer(first - began, (last - first) / max(1, tokens - 1), ids, cached)

    async def _chunks(self, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Events of the reply."""
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port or 80, limit=1 << 24)
        try:
            head = (
                f"POST {where.path}/v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            )
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write((head + length).encode() + body)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            chunked = False
            while (line := await reader.readline()).strip():
                chunked = chunked or line.lower().split(b":")[0] == b"transfer-encoding"
            if status != 200:
                raise Unmeasured(f"{status}: {(await reader.read())[:500].decode(errors='replace')}")
            left = b""
            async for piece in _pieces(reader, chunked):
                *lines, left = (left + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes; a chunk stands behind a line with its size."""
    while not chunked and (piece := await reader.read(1 << 16)):
        yield piece
    while chunked and (size := int(await reader.readline() or b"0", 16)):
        yield await reader.readexactly(size)
        await reader.readline()
