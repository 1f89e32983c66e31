"""A file of requests on several engines."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bateleur.runner.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="bateleur-runner[ray] is not installed"),
]

REQUESTS = [
    *({"id": f"r{n}", "prompt": f"def function_{n}(", "max_tokens": 6, "temperature": 0} for n in range(6)),
    {"id": "many", "prompt": "x", "max_tokens": 0},
    {"id": "long", "prompt": "x " * 3000},
    {"id": "r1", "prompt": "twice"},
]
SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "block_size": 8}


def test_an_actor_says_what_one_engine_says(tmp_path: Path) -> None:
    """And what is wrong with a line stays with that line."""
    with warnings.catch_warnings(action="ignore"):  # Ray's affair
        ray_batch: Any = importlib.import_module("bateleur.runner.cli.ray_batch")
    from bateleur.runner.cli.line_formats import NativeFormat
    from bateleur.runner.cli.request_file import RequestFile

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, REQUESTS)))
    flags = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["batch", str(source), str(target), *flags, "--num-threads", "1"]) == 1
    expected = [json.loads(line) for line in target.read_text().splitlines()]

    requests = RequestFile(str(source), NativeFormat({}), Any, {})  # type: ignore[arg-type]
    requests.scan()
    (part,) = requests.chunks(lambda line: False, 100)
    actor = ray_batch._EngineActor(SMALL | {"draft": None}, None, requests.parser)
    told = asyncio.run(actor({"chunk": np.array([pickle.dumps(part)], object)}))
    requests.close()
    asyncio.run(actor._llm.close())
    for record, line, text, error in zip(expected, told["line"], told["record"], told["error"], strict=True):
        mine = json.loads(text)
        assert (mine.pop("line"), mine.get("error", "")) == (line, error)
        assert {key: mine[key] for key in mine if key != "request"} == {
            key: value for key, value in record.items() if key not in ("line", "request")
        }


def test_each_request_runs_once_if_results_go_to_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is left out: chunks run here."""
    with warnings.catch_warnings(action="ignore"):
        ray_batch: Any = importlib.import_module("bateleur.runner.cli.ray_batch")
    ran: list[int] = []

    def run_chunks(chunks: list[dict[str, bytes]], parser: Any, *_: Any) -> Iterator[tuple[int, dict[str, Any], None]]:
        for chunk in chunks:
            for request in pickle.loads(chunk["chunk"]).requests(parser):
                ran.append(request.line)
                yield request.line, {"line": request.line}, None

    monkeypatch.setattr(ray_batch, "_run_chunks", run_chunks)
    monkeypatch.setattr(ray_batch, "ray_cluster", lambda *_: nullcontext())
    source, target = tmp_path / "in.jsonl", tmp_path / "pipe"
    source.write_text("\n".join(map(json.dumps, REQUESTS)))
    os.mkfifo(target)
    reader = os.open(target, os.O_RDWR)
    try:
        assert main(["batch", str(source), str(target), "--replicas", "2"]) == 0
        written = os.read(reader, 1 << 16).splitlines()
    finally:
        os.close(reader)
    assert ran == [json.loads(line)["line"] for line in written] == list(range(1, 1 + len(REQUESTS)))


DOUBLE = """
import asyncio, json, os, sys
from pathlib import Path
import numpy, pickle
from bateleur.runner.cli import main, ray_batch

class Engine:
    def __init__(self, engine, num_threads, reader):
        self.reader = reader
    async def __call__(self, batch):
        part, rows = pickle.loads(batch["chunk"][0]), []
        for request in part.requests(self.reader):
            prompt = request.api_request.prompts[0]["prompt"]
            while not prompt.startswith("early") and not Path(SOURCE + ".killed").exists():
                await asyncio.sleep(0.1)
            with open(SOURCE + ".asked", "a") as asked:
                asked.write(prompt + "\\n")
            if prompt == "die" or prompt == "once" and not Path(SOURCE + ".died").exists():
                Path(SOURCE + ".died").touch()
                os._exit(1)
            about = {"line": request.line, "id": request.id, "request": request.digest}
            rows.append((request.line, about | {"text": prompt}))
        lines, records = zip(*rows)
        return {
            "line": numpy.array(lines),
            "record": numpy.array([json.dumps(each) for each in records], object),
            "error": numpy.array([""] * len(rows), object),
        }

SOURCE = sys.argv[1]
"""
RUN = f"""{DOUBLE}
class Double(Engine):
    def __init__(self, *args):
        global SOURCE
        SOURCE = PATH
        super().__init__(*args)
PATH = SOURCE
ray_batch._EngineActor = Double
sys.exit(main(["batch", *sys.argv[1:], "--replicas", "2"]))
"""
CLUSTER = """
import ray, sys
from bateleur.runner.replicas.server import ray_cluster

with ray_cluster(None, 4):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray that outlives those who use it."""
    call = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_run_that_is_killed_is_gone_on_with(tmp_path: Path, cluster: str) -> None:
    """And a line of which engines die fails alone. Actors need no model here, but the Ray is one, and is joined."""
    source, target, script = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "double.py"
    prompts = [f"early {n}" for n in range(8)] + [*"abcd", "once", *"efgh", "die", *"ijkl"]
    source.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    script.write_text(RUN)
    call = [sys.executable, str(script), str(source), str(target), "--ray-address", cluster]
    deadline = time.monotonic() + 200
    with subprocess.Popen(call) as first:
        while first.poll() is None and time.monotonic() < deadline:
            if target.exists() and len(target.read_text().splitlines()) == 8:
                break
            time.sleep(0.1)
        first.kill()
    assert first.returncode == -signal.SIGKILL
    before = [json.loads(line) for line in target.read_text().splitlines()]
    Path(f"{source}.killed").touch()

    run = subprocess.run(call, capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stderr
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["text"] for result in before] == prompts[:8]
    assert results[:8] == before
    assert [result["line"] for result in results] == list(range(1, len(prompts) + 1))
    failed = [result for result in results if "error" in result]
    assert [result["line"] for result in failed] == [prompts.index("die") + 1]
    assert "every engine that ran it has died" in failed[0]["error"]
    told = {result["line"]: result["text"] for result in results if "error" not in result}
    assert told == {n: prompt for n, prompt in enumerate(prompts, 1) if prompt != "die"}
    asked = Path(f"{source}.asked").read_text().splitlines()
    assert [asked.count(f"early {n}") for n in range(8)] == [1] * 8
