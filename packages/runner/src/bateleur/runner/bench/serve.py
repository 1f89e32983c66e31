"""`bateleur bench serve`: latency and throughput of one or two servers under random arrivals, in interleaved rounds."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bateleur.runner.bench.config import ServeBenchConfig
from bateleur.runner.bench.peers import ServerProcess, bateleur_command, vllm_command
from bateleur.runner.errors import Unmeasured
from bateleur.runner.utils.json_file import read_json

_TURNS = 4
_SYSTEM_TOKENS = 256
"""Tokens of the system prompt that all conversations share."""
_WARM_UP_TOKENS = (200, 40)
"""Prompt lengths of two uncounted requests at the start of a round: the server was paused before."""


def bench_serve(
    model: Path, config: ServeBenchConfig, options: dict[str, Any], report: Callable[[str], None], command: str
) -> dict[str, Any]:
    """Measure one or two servers at every request rate. Raises Unmeasured if a server does not answer.

    options: options of `LLM` for servers that are started. report: called with progress. command: recorded in the
    result.
    """
    with ExitStack() as stack:
        servers = _servers(model, config, options, stack)
        start_times = {}
        for server in servers:
            report(f"waiting for {server.name}")
            start_times[server.name] = server.wait_until_healthy()
            server.pause()
        workload = Workload(model, config)
        for server in servers:  # warm up: compilation and first use of memory are not measured
            workload.run(server, 4.0, 7, count=8)
        rows = []
        for rate in config.request_rate:
            report(f"{config.num_iters} rounds of {config.num_prompts} requests at {rate:g} requests/s")
            rows.append(_compare(servers, workload, rate, config.num_iters))
    return {
        "date": date.today().isoformat(),
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "seconds_until_healthy": start_times,
        "results": rows,
    }


def _servers(model: Path, config: ServeBenchConfig, options: dict[str, Any], stack: ExitStack) -> list[ServerProcess]:
    if config.base_url is not None:
        return [ServerProcess("server", config.base_url)]
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    commands = {"bateleur": bateleur_command(model, options, config.ours)}
    if config.vllm is not None:
        commands["vllm"] = vllm_command(config.vllm, model, options, config.theirs)
    servers = []
    for name, line in commands.items():
        servers.append(ServerProcess.start(name, line, logs))
        stack.callback(servers[-1].close)
    return servers


class Workload:
    """Requests with random arrival times. Equal seeds give equal requests."""

    def __init__(self, model: Path, config: ServeBenchConfig) -> None:
        self._config = config
        self._model = config.served_model_name or str(model)
        fields = read_json(model / "config.json")
        size = int(fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size") or 0)
        self._ids = (5, size - 8) if size > 32 else (1, max(2, size))

    def run(self, server: ServerProcess, rate: float, seed: int, count: int | None = None) -> dict[str, Any]:
        """Run one round of `count` requests. Returns results, output token ids and number of cached prompt tokens."""
        server.resume()
        try:
            replies, seconds = asyncio.run(self._round(server, rate, seed, count or self._config.num_prompts))
        finally:
            server.pause()
        figures = {"tokens_per_s": len(replies) * self._config.random_output_len / seconds}
        latencies = {
            "first_token_ms": [1e3 * reply.first_token_s for reply in replies],
            "per_token_ms": [1e3 * reply.per_token_s for reply in replies],
        }
        for name, values in latencies.items():
            figures |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 99)}
        cached = sum(reply.num_cached_tokens for reply in replies)
        return {"figures": figures, "ids": [reply.token_ids for reply in replies], "cached": cached}

    async def _round(
        self, server: ServerProcess, rate: float, seed: int, count: int
    ) -> tuple[list[TimedCompletion], float]:
        client = CompletionClient(server.url, self._model, self._config.timeout)
        first, last = self._ids
        for length in _WARM_UP_TOKENS:
            await client.complete(list(range(first, min(first + length, last))), 8)
        rng = random.Random(seed)
        run = self._conversations if self._config.dataset_name == "conversations" else self._single_requests
        began = time.perf_counter()
        replies = await run(client, rate, count, rng)
        return replies, time.perf_counter() - began

    async def _single_requests(
        self, client: CompletionClient, rate: float, count: int, rng: random.Random
    ) -> list[TimedCompletion]:
        """Send prompts without a common prefix."""
        mean, spread = self._config.random_input_len, self._config.random_range_ratio
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        prompts = [self._random_ids(rng, rng.randint(low, high)) for _ in range(count)]
        tokens = self._config.random_output_len
        return await _run_poisson([client.complete(prompt, tokens) for prompt in prompts], rate, rng)

    async def _conversations(
        self, client: CompletionClient, rate: float, count: int, rng: random.Random
    ) -> list[TimedCompletion]:
        """Send conversations that share a system prompt. `rate` counts requests, one per turn of a conversation."""
        system = self._random_ids(rng, _SYSTEM_TOKENS)

        async def converse(messages: list[list[int]], pauses: list[float]) -> list[TimedCompletion]:
            history, replies = list(system), []
            for message, pause in zip(messages, pauses, strict=True):
                await asyncio.sleep(pause)
                history += message
                replies.append(await client.complete(history, self._config.random_output_len))
                history += replies[-1].token_ids
            return replies

        conversations = []
        for _ in range(max(1, count // _TURNS)):
            messages = [self._random_ids(rng, rng.randint(8, 64)) for _ in range(_TURNS)]
            conversations.append(converse(messages, [0.0, *(rng.expovariate(1.0) for _ in range(_TURNS - 1))]))
        return [each for replies in await _run_poisson(conversations, rate / _TURNS, rng) for each in replies]

    def _random_ids(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(*self._ids) for _ in range(length)]


async def _run_poisson(calls: list[Coroutine[Any, Any, Any]], rate: float, rng: random.Random) -> list[Any]:
    """Start calls as a Poisson process of `rate` per second, and return their results."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*tasks)


def _compare(servers: list[ServerProcess], workload: Workload, rate: float, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for index in range(rounds):
        for server in servers if index % 2 == 0 else servers[::-1]:
            found[server.name].append(workload.run(server, rate, 1000 * index + int(10 * rate)))
    config = workload._config
    row: dict[str, Any] = {"workload": config.dataset_name, "requests_per_s": rate, "requests": config.num_prompts}
    for name, runs in found.items():
        figures = runs[0]["figures"]
        row[name] = {each: statistics.median(run["figures"][each] for run in runs) for each in figures}
        row[name]["cached_tokens"] = statistics.median(run["cached"] for run in runs)
    if len(found) == 2:
        ours, theirs = found.values()
        rounds_of = zip(ours, theirs, strict=True)
        pairs = [pair for a, b in rounds_of for pair in zip(a["ids"], b["ids"], strict=True)]
        row["equal_requests"] = [sum(a == b for a, b in pairs), len(pairs)]
        if 2 * row["equal_requests"][0] < len(pairs):
            row["fault"] = "not comparable: most requests have other tokens than bateleur's"
    return row


def serve_table(result: dict[str, Any]) -> str:
    """Return results as a table for a terminal: requests with equal tokens, then latencies and speeds."""
    start_times = ", ".join(f"{name} {s:.1f}" for name, s in result["seconds_until_healthy"].items())
    lines = [f"seconds until healthy: {start_times}"]
    for row in result["results"]:
        rate, count = row["requests_per_s"], row["requests"]
        lines.append(f"{row['workload']}, {rate:g} requests/s, {count} requests per round")
        if "equal_requests" in row:
            lines.append("    same tokens {} of {}".format(*row["equal_requests"]))
        if "fault" in row:
            lines.append(f"    {row['fault']}")
            continue
        for name in result["seconds_until_healthy"]:
            figures = "  ".join(f"{key} {value:.1f}" for key, value in row[name].items())
            lines.append(f"    {name:9} {figures}")
    return "\n".join(lines) + "\n"


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
