"""`bateleur bench serve`: time to first token, time per token and throughput of live servers, in turn."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from bateleur.runner.bench import VLLM_VARIABLES
from bateleur.runner.bench.client import Answer, Client
from bateleur.runner.bench.config import ServeBenchConfig
from bateleur.runner.bench.servers import Server, bateleur_command, vllm_command
from bateleur.runner.utils.json_file import read_json

_TURNS = 4
_COMMON = 256
"""Tokens in front of every conversation."""
_WARM_UPS = (200, 40)
"""Prompts before those that count: a server has been stopped for a while."""
_FIGURES = ("first_token_ms", "per_token_ms")


def serving(
    model: Path, config: ServeBenchConfig, options: dict[str, Any], say: Callable[[str], None], command: str
) -> dict[str, Any]:
    """Start what is to be measured, or find it, and let requests arrive. Unmeasured if a server does not answer."""
    with ExitStack() as stack:
        servers = _servers(model, config, options, stack)
        up = {}
        for server in servers:
            say(f"waiting for {server.name}")
            up[server.name] = server.wait()
            server.pause()
        workload = Workload(model, config)
        for server in servers:  # what is compiled or first touched is not of interest
            workload.run(server, 4.0, 7, count=8)
        rows = []
        for rate in config.request_rate:
            say(f"{config.num_iters} rounds of {config.num_prompts} requests, {rate:g} a second")
            rows.append(_compare(servers, workload, rate, config.num_iters))
    return {
        "date": date.today().isoformat(),
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "seconds_until_healthy": up,
        "results": rows,
    }


def _servers(
    model: Path, config: ServeBenchConfig, options: dict[str, Any], stack: ExitStack
) -> list[Server]:
    if config.base_url is not None:
        return [Server("server", config.base_url)]
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = [Server.start("bateleur", bateleur_command(model, options, config.ours), logs, {})]
    stack.callback(servers[0].close)
    if config.vllm is not None:
        line = vllm_command(config.vllm, model, options, config.theirs)
        servers.append(Server.start("vllm", line, logs, VLLM_VARIABLES))
        stack.callback(servers[1].close)
    return servers


class Workload:
    """Requests as they arrive, the same for every server that is asked with the same seed."""

    def __init__(self, model: Path, config: ServeBenchConfig) -> None:
        self._config = config
        self._model = config.served_model_name or str(model)
        fields = read_json(model / "config.json")
        size = int(fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size") or 0)
        self._ids = (5, size - 8) if size > 32 else (1, max(2, size))

    def run(self, server: Server, rate: float, seed: int, count: int | None = None) -> dict[str, Any]:
        """One round: figures, the tokens of each request, and how many tokens the server had."""
        server.go_on()
        try:
            answers, seconds = asyncio.run(self._round(server, rate, seed, count or self._config.num_prompts))
        finally:
            server.pause()
        figures = {"tokens_per_s": len(answers) * self._config.random_output_len / seconds}
        for name, values in zip(
            _FIGURES, zip(*((a.first, a.per_token) for a in answers), strict=True), strict=True
        ):
            figures |= {
                f"{name}_p{p}": float(np.percentile([1e3 * each for each in values], p)) for p in (50, 99)
            }
        cached = sum(answer.cached for answer in answers)
        return {"figures": figures, "ids": [answer.tokens for answer in answers], "cached": cached}

    async def _round(self, server: Server, rate: float, seed: int, count: int) -> tuple[list[Answer], float]:
        client = Client(server.url, self._model, self._config.timeout)
        for length in _WARM_UPS:
            await client.ask(
                list(range(self._ids[0], self._ids[0] + min(length, self._ids[1] - self._ids[0]))), 8
            )
        dice = random.Random(seed)
        kind = self._conversations if self._config.dataset_name == "conversations" else self._singles
        began = time.perf_counter()
        answers = await kind(client, rate, count, dice)
        return answers, time.perf_counter() - began

    async def _singles(self, client: Client, rate: float, count: int, dice: random.Random) -> list[Answer]:
        """Prompts that share nothing."""
        mean, spread = self._config.random_input_len, self._config.random_range_ratio
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        prompts = [self._draw(dice, dice.randint(low, high)) for _ in range(count)]
        tokens = self._config.random_output_len
        return await _arriving([client.ask(prompt, tokens) for prompt in prompts], rate, dice)

    async def _conversations(
        self, client: Client, rate: float, count: int, dice: random.Random
    ) -> list[Answer]:
        """Turns behind what all share and what was said before; `rate` is that of turns."""
        system = self._draw(dice, _COMMON)

        async def talk(said: list[list[int]], pauses: list[float]) -> list[Answer]:
            history, answers = list(system), []
            for words, pause in zip(said, pauses, strict=True):
                await asyncio.sleep(pause)
                history += words
                answers.append(await client.ask(history, self._config.random_output_len))
                history += answers[-1].tokens
            return answers

        talks = []
        for _ in range(max(1, count // _TURNS)):
            said = [self._draw(dice, dice.randint(8, 64)) for _ in range(_TURNS)]
            talks.append(talk(said, [0.0, *(dice.expovariate(1.0) for _ in range(_TURNS - 1))]))
        return [each for answers in await _arriving(talks, rate / _TURNS, dice) for each in answers]

    def _draw(self, dice: random.Random, length: int) -> list[int]:
        return [dice.randrange(*self._ids) for _ in range(length)]


async def _arriving(calls: list[Coroutine[Any, Any, Any]], rate: float, dice: random.Random) -> list[Any]:
    """Start each when it arrives; what all of them came to."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(dice.expovariate(rate))
    return await asyncio.gather(*tasks)


def _compare(servers: list[Server], workload: Workload, rate: float, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for index in range(rounds):
        for server in servers if index % 2 == 0 else servers[::-1]:
            found[server.name].append(workload.run(server, rate, 1000 * index + int(10 * rate)))
    config = workload._config
    row: dict[str, Any] = {
        "workload": config.dataset_name,
        "requests_per_s": rate,
        "requests": config.num_prompts,
    }
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
            row["fault"] = "most requests got other tokens than ours got"
    return row


def serve_table(result: dict[str, Any]) -> str:
    """Results as lines for a terminal: the tokens first, then the speeds."""
    up = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["seconds_until_healthy"].items())
    lines = [f"seconds until healthy: {up}"]
    for row in result["results"]:
        lines.append(f"{row['workload']}, {row['requests_per_s']:g} requests/s, {row['requests']} a round")
        if "equal_requests" in row:
            lines.append("    same tokens {} of {}".format(*row["equal_requests"]))
        if "fault" in row:
            lines.append(f"    {row['fault']}")
            continue
        for name in result["seconds_until_healthy"]:
            figures = "  ".join(f"{key} {value:.1f}" for key, value in row[name].items())
            lines.append(f"    {name:9} {figures}")
    return "\n".join(lines) + "\n"
