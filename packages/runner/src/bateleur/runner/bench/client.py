"""Client of an OpenAI-compatible server, with one connection per request."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from bateleur.runner.errors import Unmeasured


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """Output and latencies of one request, as the client saw them."""

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
        try:
            return await self._complete(body)
        except httpx.TimeoutException as error:
            raise Unmeasured(f"{self.url} sent nothing for {self.timeout:g} seconds (--timeout)") from error
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unmeasured(f"{self.url} sent a reply that cannot be read: {error!r}"[:500]) from error

    async def _complete(self, body: dict[str, Any]) -> TimedCompletion:
        began, first, last, cached = time.perf_counter(), 0.0, 0.0, 0
        ids: list[int] = []
        async with (
            httpx.AsyncClient(timeout=self.timeout, trust_env=False, verify=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                text = (await reply.aread())[:500].decode(errors="replace")
                raise Unmeasured(f"{reply.status_code}: {text}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Unmeasured(json.dumps(chunk)[:500])
                if chunk.get("usage"):
                    cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                for choice in chunk["choices"]:
                    if choice.get("token_ids"):
                        ids += choice["token_ids"]
                        last = time.perf_counter()
                        first = first or last
        if len(ids) != body["max_tokens"]:
            raise Unmeasured(f"{self.url} returned {len(ids)} tokens instead of {body['max_tokens']}")
        return TimedCompletion(first - began, (last - first) / max(1, len(ids) - 1), ids, cached)
