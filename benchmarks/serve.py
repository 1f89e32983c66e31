"""Time to first token, time per token and throughput of a live server, beside `vllm serve` behind the same client.

    uv run python benchmarks/serve.py --vllm VENV/bin/python --output benchmarks/results/serve-cpu.json

Both serve one checkpoint (that of `benchmarks/rival.py`, or --model DIR) in float32, ours with prefix caching, and take
turns in every round while the other is stopped. Requests arrive by a Poisson process, the same for both. Two workloads:
prompts of their own, and conversations whose turns share all that was said before. A figure is the median over rounds.
Without --vllm only bateleur is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rival import write_checkpoint


@dataclass
class Server:
    """A server in a process of its own."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, seconds: float = 600) -> float:
        """Until it says that it is healthy; how long that took."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return time.perf_counter() - began
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not come up; its last words: {self.log.read_text()[-2000:]}")

    def pause(self) -> None:
        """Stop all of its processes: one that is idle may still poll."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self.process.terminate()
        self.process.wait(60)


def start(name: str, command: list[str], logs: Path, extra: dict[str, str]) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = logs / f"{name}.log"
    with log.open("wb") as file:
        line = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            line, stdout=file, stderr=file, env=os.environ | extra, start_new_session=True
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log)


@dataclass
class Answer:
    """One request as its client saw it, in seconds."""

    first: float
    """From the request to the first token."""
    per_token: float
    """Behind the first."""
    tokens: list[int]
    cached: int


class Client:
    """Asks one server."""

    def __init__(self, server: Server, model: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)
        )
        self._model = model

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        first = last = 0.0
        ids: list[int] = []
        cached = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()[:500]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(line)
                if chunk.get("usage"):
                    details = chunk["usage"].get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or 0
                for choice in chunk["choices"]:
                    if choice.get("token_ids"):
                        ids += choice["token_ids"]
                        last = time.perf_counter()
                        first = first or last
        if len(ids) != tokens:
            raise RuntimeError(f"{len(ids)} tokens came of {tokens}")
        return Answer(first - began, (last - first) / max(1, tokens - 1), ids, cached)

    async def close(self) -> None:
        await self._http.aclose()


async def singles(client: Client, rate: float, count: int, tokens: int, seed: int) -> list[Answer]:
    """Prompts of 32 to 256 tokens that share nothing, as they arrive."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(5, 4000) for _ in range(dice.randrange(32, 257))] for _ in range(count)]
    return await arriving([client.ask(prompt, tokens) for prompt in prompts], rate, dice)


async def conversations(client: Client, rate: float, count: int, tokens: int, seed: int) -> list[Answer]:
    """Four turns each behind a common prompt of 256 tokens; `rate` is that of turns."""
    dice, turns = random.Random(seed), 4
    system = [dice.randrange(5, 4000) for _ in range(256)]

    async def talk(said: list[list[int]], pauses: list[float]) -> list[Answer]:
        history, answers = list(system), []
        for words, pause in zip(said, pauses, strict=True):
            await asyncio.sleep(pause)
            history += words
            answers.append(await client.ask(history, tokens))
            history += answers[-1].tokens
        return answers

    talks = []
    for _ in range(count // turns):
        said = [[dice.randrange(5, 4000) for _ in range(dice.randrange(8, 65))] for _ in range(turns)]
        talks.append(talk(said, [0.0, *(dice.expovariate(1.0) for _ in range(turns - 1))]))
    return [each for answers in await arriving(talks, rate / turns, dice) for each in answers]


async def arriving(calls: list[Coroutine[Any, Any, Any]], rate: float, dice: random.Random) -> list[Any]:
    """Start each when it arrives; what all of them came to."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(dice.expovariate(rate))
    return await asyncio.gather(*tasks)


THEIRS = "--enforce-eager --no-enable-prefix-caching"
"""With prefix caching vLLM 0.32 for CPU dies of the second turn of a talk: an IndexError in mamba_mixer2.py."""
WORKLOADS = {"singles": singles, "conversations": conversations}


def measure(
    server: Server, model: str, kind: str, rate: float, count: int, tokens: int, seed: int
) -> dict[str, Any]:
    async def go() -> tuple[list[Answer], float]:
        client = Client(server, model)
        for length in (200, 40):  # it has been stopped for a while
            await client.ask(list(range(5, 5 + length)), 8)
        began = time.perf_counter()
        answers = await WORKLOADS[kind](client, rate, count, tokens, seed)
        seconds = time.perf_counter() - began
        await client.close()
        return answers, seconds

    server.go_on()
    answers, seconds = asyncio.run(go())
    server.pause()
    figures = {"tokens_per_s": len(answers) * tokens / seconds}
    for name, values in (
        ("first_token_ms", [1e3 * each.first for each in answers]),
        ("per_token_ms", [1e3 * each.per_token for each in answers]),
    ):
        figures |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 99)}
    return {
        "figures": figures,
        "ids": [each.tokens for each in answers],
        "cached": sum(each.cached for each in answers),
    }


def compare(
    servers: list[Server], model: str, kind: str, rate: float, args: argparse.Namespace
) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    for index in range(args.rounds):
        for server in servers if index % 2 == 0 else servers[::-1]:
            seed = 1000 * index + int(10 * rate)
            run = measure(server, model, kind, rate, args.requests, args.tokens, seed)
            rounds[server.name].append(run)
    row: dict[str, Any] = {"workload": kind, "requests_per_s": rate, "requests": args.requests}
    for name, runs in rounds.items():
        row[name] = {
            figure: statistics.median(run["figures"][figure] for run in runs) for figure in runs[0]["figures"]
        }
        row[name]["cached_tokens"] = statistics.median(run["cached"] for run in runs)
    if len(rounds) == 2:
        ours, theirs = rounds.values()
        pairs = [
            pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a["ids"], b["ids"], strict=True)
        ]
        row["equal_requests"] = [sum(a == b for a, b in pairs), len(pairs)]
    return row


def show(row: dict[str, Any], names: list[str]) -> None:
    print(f"{row['workload']}, {row['requests_per_s']} requests/s, {row['requests']} a round", flush=True)
    for name in names:
        figures = "  ".join(f"{key} {value:.1f}" for key, value in row[name].items())
        print(f"    {name:9} {figures}", flush=True)
    if "equal_requests" in row:
        print(f"    same tokens {row['equal_requests']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 6.0])
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", default="--enable-prefix-caching", help="more options of bateleur serve")
    parser.add_argument("--theirs", default=THEIRS, help="more options of vllm serve")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or work / "checkpoint"
        if args.model is None:
            write_checkpoint(model)
        common = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32"]
        bateleur = [sys.executable, "-m", "bateleur.runner", "serve", str(model), "--device", "cpu"]
        commands: dict[str, tuple[list[str], dict[str, str]]] = {
            "bateleur": ([*bateleur, *common, *args.ours.split()], {})
        }
        if args.vllm:
            environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}
            commands["vllm"] = (
                [
                    args.vllm,
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    "--model",
                    str(model),
                    *common,
                    *args.theirs.split(),
                ],
                environment,
            )
        servers, up = [], {}
        for name, (command, extra) in commands.items():
            server = start(name, command, work, extra)
            stack.callback(server.close)
            up[name] = server.wait()
            server.pause()
            servers.append(server)
        print(
            "seconds until healthy: " + ", ".join(f"{name} {each:.1f}" for name, each in up.items()),
            flush=True,
        )
        rows = []
        for kind in args.workloads:
            for server in servers:  # what is compiled or first touched is not of interest
                measure(server, str(model), kind, 4.0, 8, args.tokens, 7)
            for rate in args.rates:
                rows.append(compare(servers, str(model), kind, rate, args))
                show(rows[-1], list(commands))
    if args.output is not None:
        said = " ".join(["python", *("VENV/bin/python" if arg == args.vllm else arg for arg in sys.argv)])
        result = {
            "date": date.today().isoformat(),
            "command": said,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "seconds_until_healthy": up,
            "results": rows,
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
