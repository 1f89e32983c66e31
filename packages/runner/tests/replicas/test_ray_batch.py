"""A file of requests on several engines."""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bateleur.runner.cli import main

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="bateleur-runner[ray] is not installed")

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
    from bateleur.runner.cli.line_forms import OwnForm
    from bateleur.runner.cli.request_file import RequestFile

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, REQUESTS)))
    flags = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["batch", str(source), str(target), *flags, "--num-threads", "1"]) == 1
    expected = [json.loads(line) for line in target.read_text().splitlines()]

    requests = RequestFile(str(source), OwnForm({}), Any, {})  # type: ignore[arg-type]
    requests.survey()
    (part,) = requests.parts(lambda line: False, 100)
    actor = ray_batch._Engine(SMALL | {"draft": None}, None, requests.reader)
    told = asyncio.run(actor({"part": np.array([pickle.dumps(part)], object)}))
    requests.close()
    asyncio.run(actor._llm.close())
    for record, line, text, error in zip(expected, told["line"], told["record"], told["error"], strict=True):
        mine = json.loads(text)
        assert (mine.pop("line"), mine.get("error", "")) == (line, error)
        assert {key: mine[key] for key in mine if key != "request"} == {
            key: value for key, value in record.items() if key not in ("line", "request")
        }


DOUBLE = """
import json, os, sys
from pathlib import Path
import numpy, pickle
from bateleur.runner.cli import main, ray_batch

class Engine:
    def __init__(self, engine, num_threads, reader):
        self.reader = reader
    async def __call__(self, batch):
        part, rows = pickle.loads(batch["part"][0]), []
        for request in part.requests(self.reader):
            prompt = request.asked.prompts[0]["prompt"]
            if prompt == "die" or prompt == "once" and not Path(sys.argv[1] + ".died").exists():
                Path(sys.argv[1] + ".died").touch()
                os._exit(1)
            about = {"line": request.line, "id": request.id, "request": request.digest}
            rows.append((request.line, about | {"text": prompt}))
        lines, records = zip(*rows)
        return {
            "line": numpy.array(lines),
            "record": numpy.array([json.dumps(each) for each in records], object),
            "error": numpy.array([""] * len(rows), object),
        }

class Double(Engine):
    def __init__(self, *args):
        sys.argv[1:] = [PATH]
        super().__init__(*args)

PATH = sys.argv[1]
ray_batch._Engine = Double
sys.exit(main(["batch", sys.argv[1], sys.argv[2], "--replicas", "2"]))
"""


def test_a_line_of_which_engines_die_fails_alone(tmp_path: Path) -> None:
    """On a Ray of this machine, with actors that need no model; what has a result already is not asked again."""
    source, target, script = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "double.py"
    prompts = ["ready", *"abcd", "once", *"efgh", "die", *"ijkl"]
    source.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    script.write_text(DOUBLE)
    call = [sys.executable, str(script), str(source), str(target)]
    run = subprocess.run(call, capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stderr
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["line"] for result in results] == list(range(1, len(prompts) + 1))
    failed = [result for result in results if "error" in result]
    assert [result["line"] for result in failed] == [prompts.index("die") + 1]
    assert "every engine that read it has died" in failed[0]["error"]
    assert [result["text"] for result in results if "error" not in result] == [
        prompt for prompt in prompts if prompt != "die"
    ]
