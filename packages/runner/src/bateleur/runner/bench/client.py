"""Client of an OpenAI-compatible server, with only the standard library: one connection per request."""

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
class TimedCompletion:
    """Output and latencies of one request, as measured by the client."""

    first_token_s: float
    """Seconds from sending the request to the first token."""
    per_token_s: float
    """Seconds per token after the first."""
    token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that the server reports as prefix cache hits."""


@dataclass(frozen=True, slots=True)
class CompletionClient:
    """Requests completions of token ids from one server.

    url: http://host:port. model: the served model name. timeout: seconds without a byte until the request fails.
    """

    url: str
    model: str
    timeout: float = 600.0

    async def complete(self, prompt: list[int], num_tokens: int) -> TimedCompletion:
        """Stream exactly `num_tokens` greedy tokens. Raises Unmeasured for an error, a wrong reply, or no reply."""
        try:
            async with asyncio.timeout(self.timeout) as deadline:
                return await self._complete(prompt, num_tokens, deadline)
        except TimeoutError as error:
            raise Unmeasured(f"{self.url} sent nothing for {self.timeout:g} seconds (--timeout)") from error
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unmeasured(f"{self.url} sent a reply that cannot be read: {error!r}"[:500]) from error

    async def _complete(self, prompt: list[int], num_tokens: int, deadline: asyncio.Timeout) -> TimedCompletion:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        began, first, last, cached = time.perf_counter(), 0.0, 0.0, 0
        ids: list[int] = []
        async for chunk in self._events(json.dumps(body).encode()):
            deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
            if "error" in chunk:
                raise Unmeasured(json.dumps(chunk)[:500])
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    ids += choice["token_ids"]
                    last = time.perf_counter()
                    first = first or last
        if len(ids) != num_tokens:
            raise Unmeasured(f"{self.url} returned {len(ids)} tokens instead of {num_tokens}")
        return TimedCompletion(first - began, (last - first) / max(1, num_tokens - 1), ids, cached)

    async def _events(self, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Post a request and yield its server-sent events."""
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port or 80, limit=1 << 24)
        try:
            head = f"POST {where.path}/v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
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
            async for part in _body_parts(reader, chunked):
                *lines, left = (left + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])
        finally:
            writer.close()


async def _body_parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. With chunked encoding a line with its size comes before each chunk."""
    while not chunked and (part := await reader.read(1 << 16)):
        yield part
    while chunked and (size := int(await reader.readline() or b"0", 16)):
        yield await reader.readexactly(size)
        await reader.readline()
