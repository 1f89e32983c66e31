"""`bateleur bench serve`: latency and throughput of one or two servers under random arrivals, in interleaved rounds."""

import asyncio
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
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

Message = tuple[float, list[int]]  # seconds to wait before it, and its token ids
_TURNS = 4
_SYSTEM_TOKENS = 256  # tokens of the system prompt that all conversations share
_WARM_UP_TOKENS = (200, 40)
"""Prompt lengths of two uncounted requests at the start of a round: the server was paused before."""


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """Output and latencies of one request, as the client saw them: seconds from sending the request to the first token,
    and seconds per token after the first.
    """

    first_token_s: float
    per_token_s: float
    token_ids: list[int]
    num_cached_tokens: int  # prompt tokens that the server reports as prefix cache hits


@dataclass(frozen=True, slots=True)
class CompletionClient:
    """Requests completions of token ids from one server."""

    url: str  # http://host:port
    model: str  # the served model name
    timeout: float = 600.0  # seconds without a byte until the request fails

    async def complete(self, prompt: list[int], num_tokens: int) -> TimedCompletion:
        """Stream exactly `num_tokens` greedy tokens. Raises Unmeasured for an error, a wrong reply, or no reply."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
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


def bench_serve(
    model: Path, config: ServeBenchConfig, options: dict[str, Any], report: Callable[[str], None], command: str
) -> dict[str, Any]:
    """Measure one or two servers at every request rate; return the JSON object of the results.

    Raises Unmeasured if a server does not answer.
    options: options of `LLM` for servers that are started. report: called with progress messages. command: the command
    line, for the result.
    """
    with ExitStack() as stack:
        servers = [] if config.base_url is None else [ServerProcess("server", config.base_url)]
        if config.base_url is None:
            commands = {"bateleur": bateleur_command(model, options, config.ours)}
            if config.vllm is not None:
                commands["vllm"] = vllm_command(config.vllm, model, options, config.theirs)
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, line in commands.items():
                servers.append(ServerProcess.start(name, line, logs))
                stack.callback(servers[-1].close)
        start_times = {}
        for server in servers:
            report(f"waiting for {server.name}")
            start_times[server.name] = server.wait_until_healthy()
            server.signal(signal.SIGSTOP)
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


class Workload:
    """Sends random token ids or conversations to a server at random times. Equal seeds give equal requests.

    model: checkpoint folder, for vocabulary size and model name. config: options of `bateleur bench serve`.
    """

    def __init__(self, model: Path, config: ServeBenchConfig) -> None:
        self.config = config
        self._model = config.served_model_name or str(model)
        fields = read_json(model / "config.json")
        size = int(fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size") or 0)
        self._ids = (5, size - 8) if size > 32 else (1, max(2, size))

    def run(self, server: ServerProcess, rate: float, seed: int, count: int | None = None) -> dict[str, Any]:
        """Run one round of `count` requests. Returns a dict: `figures` (output tokens per second, and percentiles of
        latencies in ms), `ids` (output token ids by request) and `cached` (number of cached prompt tokens).

        rate: mean requests per second. count: None for `num_prompts` of the options.
        """
        server.signal(signal.SIGCONT)
        try:
            replies, seconds = asyncio.run(self._round(server, rate, seed, count or self.config.num_prompts))
        finally:
            server.signal(signal.SIGSTOP)
        figures = {"tokens_per_s": len(replies) * self.config.random_output_len / seconds}
        for name in ("first_token", "per_token"):
            milliseconds = [1e3 * getattr(reply, f"{name}_s") for reply in replies]
            figures |= {f"{name}_ms_p{p}": float(np.percentile(milliseconds, p)) for p in (50, 99)}
        cached = sum(reply.num_cached_tokens for reply in replies)
        return {"figures": figures, "ids": [reply.token_ids for reply in replies], "cached": cached}

    async def _round(
        self, server: ServerProcess, rate: float, seed: int, count: int
    ) -> tuple[list[TimedCompletion], float]:
        """Start conversations as a Poisson process, with `rate` requests per second. Returns replies and duration."""
        client = CompletionClient(server.url, self._model, self.config.timeout)
        first, last = self._ids
        for length in _WARM_UP_TOKENS:
            await client.complete(list(range(first, min(first + length, last))), 8)
        rng = random.Random(seed)
        conversations, tasks = self._conversations(rng, count), []
        turns = len(conversations[0])
        began = time.perf_counter()
        for messages in conversations:
            tasks.append(asyncio.create_task(self._converse(client, messages)))
            await asyncio.sleep(rng.expovariate(rate / turns))
        replies = [each for answers in await asyncio.gather(*tasks) for each in answers]
        return replies, time.perf_counter() - began

    def _conversations(self, rng: random.Random, count: int) -> list[list[Message]]:
        """Return conversations with `count` messages in all, each with the seconds to wait before it."""

        def ids(length: int) -> list[int]:
            return [rng.randrange(*self._ids) for _ in range(length)]

        if self.config.dataset_name == "random":
            mean, spread = self.config.random_input_len, self.config.random_range_ratio
            low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
            return [[(0.0, ids(rng.randint(low, high)))] for _ in range(count)]
        system, found = ids(_SYSTEM_TOKENS), []
        for _ in range(max(1, count // _TURNS)):
            messages = [ids(rng.randint(8, 64)) for _ in range(_TURNS)]
            pauses = [0.0, *(rng.expovariate(1.0) for _ in range(_TURNS - 1))]
            found.append(list(zip(pauses, [system + messages[0], *messages[1:]], strict=True)))
        return found

    async def _converse(self, client: CompletionClient, messages: list[Message]) -> list[TimedCompletion]:
        history, replies = list[int](), []
        for pause, message in messages:
            await asyncio.sleep(pause)
            history += message
            replies.append(await client.complete(history, self.config.random_output_len))
            history += replies[-1].token_ids
        return replies


def _compare(servers: list[ServerProcess], workload: Workload, rate: float, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for index in range(rounds):
        for server in servers[:: -1 if index % 2 else 1]:
            found[server.name].append(workload.run(server, rate, 1000 * index + int(10 * rate)))
    config = workload.config
    row: dict[str, Any] = {"workload": config.dataset_name, "requests_per_s": rate, "requests": config.num_prompts}
    for name, runs in found.items():
        figures = runs[0]["figures"]
        row[name] = {each: statistics.median(run["figures"][each] for run in runs) for each in figures}
        row[name]["cached_tokens"] = statistics.median(run["cached"] for run in runs)
    if len(found) == 2:
        rounds_of = zip(*found.values(), strict=True)
        pairs = [pair for a, b in rounds_of for pair in zip(a["ids"], b["ids"], strict=True)]
        row["equal_requests"] = [sum(a == b for a, b in pairs), len(pairs)]
        if 2 * row["equal_requests"][0] < len(pairs):
            row["fault"] = "not comparable: most requests have other tokens than bateleur's"
    return row


def serve_table(result: dict[str, Any]) -> str:
    """Return results as a table for a terminal: latencies and speeds at each request rate, and for two servers the
    number of requests with the same tokens from both.
    """
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
