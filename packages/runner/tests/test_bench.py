"""`bateleur bench` without servers: tokens are compared before a speed is told, and the bound stands beside it."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.bench import offline, worker
from bateleur.runner.bench.config import LatencyConfig, ServeBenchConfig, ThroughputConfig
from bateleur.runner.bench.peers import EngineProcess, Task, TaskRun, TaskRuns, run_interleaved, run_task
from bateleur.runner.bench.serve import CompletionClient
from bateleur.runner.cli import main
from bateleur.runner.errors import Unmeasured

LATENCY = ["bench", "latency", "--input-len", "5", "--output-len", "4", "--batch-size", "2", "--num-iters", "2"]
SMALL = ["--device", "cpu", "--num-threads", "1", "--draft", "none"]


class InlineEngine:
    """Stands in for `EngineProcess`: runs the engine in this process."""

    closed: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        self.name = name
        settings = settings | {"read_bytes": 1 << 16}
        settings["options"] = {key: None if value == "none" else value for key, value in settings["options"].items()}
        self._generate, self.facts = worker.ENGINES[name](settings)

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        tokens = message["tokens"]
        ids = self._generate(message["prompts"], tokens)
        return {"seconds": 0.5 * sum(tokens), "cpu_seconds": 0.25 * sum(tokens), "ids": ids}

    def close(self) -> None:
        InlineEngine.closed.append(self.name)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run engines in this process. Returns the names of the engines that were closed."""
    InlineEngine.closed = []
    monkeypatch.setattr(offline, "EngineProcess", InlineEngine)
    return InlineEngine.closed


def test_latency_beside_transformers(inside: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    assert main([*LATENCY, *SMALL, "--output-json", str(output), "--peers", "transformers"]) == 0
    printed, result = capsys.readouterr().out, json.loads(output.read_text())
    assert inside == ["read", "transformers", "bateleur"]
    assert [row["engine"] for row in result["results"]] == ["bateleur", "transformers"]
    for row in result["results"]:
        assert row["equal_requests"] == [2, 2], "both give the same tokens"
        assert row["first_token_ms"] == pytest.approx(1000)
        assert row["per_token_ms"] == pytest.approx(1000)
        assert row["cpu_per_token_ms"] == pytest.approx(500)
        assert row["of_bound"] == pytest.approx(result["step"]["bound_us"] / 1e6)
    assert result["results"][1]["ratio"] == pytest.approx(1)
    assert result["step"]["batch"] == 2
    assert printed.index("same tokens") < printed.index("tokens/s")
    assert "reading them at" in printed


def test_transformers_may_emit_end_of_text_as_well(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Every token but 0 ends a text here. While they were masked, transformers generated only 0."""
    folder = shutil.copytree(tiny_checkpoint("llama")[0], tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        path.write_text(json.dumps(fields | {"eos_token_id": list(range(1, vocab_size))}))
    same = {"device": "cpu", "dtype": "float32"}
    settings = {"model": str(folder), **same, "options": {**same, "max_model_len": 32, "skip_tokenizer_init": True}}
    prompts, lengths = [[5, 6, 7], [8, 9]], [9, 6]
    ours, theirs = (worker.ENGINES[name](settings)[0](prompts, lengths) for name in ("bateleur", "transformers"))
    assert [len(ids) for ids in theirs] == lengths
    assert ours == theirs


def test_the_bound_is_of_the_cache_that_the_engine_has(tiny_checkpoint: Any) -> None:
    """Also if `kv_cache_dtype` makes keys and values smaller; all other bytes are equal."""
    folder = tiny_checkpoint("llama")[0]
    found = []
    for dtype in ("auto", "bfloat16", "fp8"):
        options = {"device": "cpu", "kv_cache_dtype": dtype}
        bench = offline.OfflineBench(offline.BenchTarget(folder, options, None, print), 64, 2)
        bench._reads = [TaskRun(1.0, 1.0, [[10**9]])]
        found.append(bench.step_bound(2, 31)["bytes"])
    keys = 2 * 32 * 5 * 2 * 2 * 24  # of two requests of 32 tokens, in five layers of two heads
    assert found == [found[2] + 3 * keys, found[2] + keys, found[2]]


def test_throughput_of_requests_of_their_own_lengths(inside: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    call = ["bench", "throughput", "--num-prompts", "6", "--input-len", "6", "--output-len", "4", "--json"]
    assert main([*call, *SMALL, "--peers", "none", "--num-iters", "1", "--max-num-seqs", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["results"]
    assert row["equal_requests"] == [6, 6]
    assert row["tokens_per_s"] == pytest.approx(2)
    assert result["step"]["batch"] == 4
    assert inside == ["read", "bateleur"]


def test_figures_are_not_lost_where_no_file_can_be_written(
    inside: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--output-json", str(tmp_path / "nowhere/figures.json"), "--peers", "none"]
    assert main([*LATENCY, *SMALL, *where]) == 2
    printed = capsys.readouterr()
    assert "2 of 2" in printed.out
    assert "nowhere/figures.json" in printed.err


OK = b"HTTP/1.1 200 OK\r\n"
REPLIES = {
    "nothing": b"",
    "no status": b"what?\r\n\r\n",
    "no event": OK + b"\r\ndata: {nope\n\n",
    "a list": OK + b"\r\ndata: [1]\n\n",
    "no choices": OK + b'\r\ndata: {"x": 1}\n\n',
    "no size": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "half": OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\nhalf",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_server_that_dies_or_says_something_else_is_told_so(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(reply)
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            await CompletionClient(f"http://127.0.0.1:{port}", "m").complete([1], 2)

    with pytest.raises(Unmeasured, match=r"http://127.0.0.1:\d+ sent a reply that cannot be read: \w+Error"):
        asyncio.run(ask())


@pytest.mark.parametrize("begun", [b"", OK + b'\r\ndata: {"choices": []}\n\n'], ids=["at once", "in the middle"])
def test_a_server_that_falls_silent_is_not_waited_for_without_end(begun: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await reader.read()  # until the client goes
        writer.close()
        await writer.wait_closed()
        gone.set()

    gone = asyncio.Event()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            try:
                await CompletionClient(f"http://127.0.0.1:{port}", "m", timeout=0.25).complete([1], 2)
            finally:
                await gone.wait()

    with pytest.raises(Unmeasured, match=r"http://127.0.0.1:\d+ sent nothing for 0.25 seconds \(--timeout\)"):
        asyncio.run(ask())


def test_other_tokens_have_no_speed(
    inside: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def strange(settings: dict[str, Any]) -> tuple[worker.Generate, dict[str, Any]]:
        return lambda prompts, tokens: [[7] * count for count in tokens], {}

    monkeypatch.setitem(worker.ENGINES, "transformers", strange)
    assert main([*LATENCY, *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    fault = "not comparable: 0 of 2 requests have bateleur's tokens"
    assert lines[2].split(None, 4) == ["transformers", "0", "of", "2", fault]
    assert "ms" not in lines[2]


def test_a_peer_that_does_not_open_is_named(
    inside: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: dict[str, Any]) -> Any:
        raise Unmeasured("lines\nno such library")

    monkeypatch.setitem(worker.ENGINES, "transformers", broken)
    assert main([*LATENCY, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "transformers  skipped: no such library" in out
    assert "transformers is skipped: no such library" in err


def test_faults() -> None:
    task = Task([[1], [2]], [2, 2])
    ids = [[1, 2], [3, 4]]
    runs = TaskRuns([TaskRun(3.0, 2.0, ids), TaskRun(1.0, 1.0, ids), TaskRun(2.0, 1.5, ids)])
    assert runs.fault(task) is None
    assert (runs.seconds, runs.cpu_seconds) == (2.0, 1.5)
    runs.runs.append(TaskRun(1.0, 1.0, [[1, 2], [3, 5]]))
    assert runs.fault(task) == "tokens of 1 of 4 rounds differ from the first"
    assert TaskRuns([TaskRun(1.0, 1.0, [[1, 2], [3]])]).fault(task) == "returned 3 tokens instead of 4"


def test_engines_take_turns() -> None:
    order: list[str] = []

    class FakeEngine:
        def __init__(self, name: str) -> None:
            self.name = name

        def request(self, message: dict[str, Any]) -> dict[str, Any]:
            order.append(self.name + str(message["tokens"][0]))
            return {"seconds": 1.0, "cpu_seconds": 1.0, "ids": []}

    engines: Any = [FakeEngine("a"), FakeEngine("b")]
    tasks = [Task([], [1]), Task([], [2])]
    found = run_interleaved(engines, tasks, 2, 1, after_round=lambda: order.append("|"))
    assert "".join(order) == "a1a2b1b2|b1b2a1a2|a1a2b1b2|"
    assert [len(runs["a"].runs) for runs in found] == [2, 2]


def test_an_engine_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unmeasured, match=r"nobody ended with 1: (?s:.*)KeyError: 'nobody'"):
        EngineProcess("nobody", {})


SCRIPT = """
import json, sys
print("hello")
print('ready {"version": "1"}', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = [[len(p)] * n for p, n in zip(asked["prompts"], asked["tokens"])]
    print("noise")
    print("done " + json.dumps({"seconds": 1.0, "cpu_seconds": 0.5, "ids": ids}), flush=True)
    if asked["tokens"] == [9]:
        sys.exit("enough")
"""


def test_processes_answer_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of a few lines, which prints what libraries print."""
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(worker, "__file__", str(script))
    engine = EngineProcess("some", {})
    assert engine.facts == {"version": "1"}
    assert run_task(engine, Task([[1, 2]], [3])).ids == [[2, 2, 2]]
    run_task(engine, Task([[1]], [9]))
    with pytest.raises(Unmeasured, match="some ended with 1: enough"):
        run_task(engine, Task([[1]], [1]))
    engine.close()


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (LatencyConfig, {"output_len": 1}, "output_len is 1; it must be an integer >= 2"),
    (LatencyConfig, {"batch_size": 0}, "batch_size is 0; it must be an integer >= 1"),
    (LatencyConfig, {"peers": ["sglang"]}, r"peers\[0\] is 'sglang'; it must be one of transformers, vllm, llama.cpp"),
    (LatencyConfig, {"peers": ["none", "vllm"]}, r"it must be names of engines, or only none"),
    (LatencyConfig, {"peers": ["vllm"]}, r"peers is \('vllm',\); it must be without vllm unless vllm is given, too"),
    (LatencyConfig, {"peers": ["llama.cpp"]}, r"it must be without llama.cpp unless gguf is given, too"),
    (ThroughputConfig, {"random_range_ratio": 1.5}, r"random_range_ratio is 1.5; it must be"),
    (ServeBenchConfig, {"base_url": "here:80"}, "base_url is 'here:80'; it must be a URL that begins with http://"),
    *(
        (ServeBenchConfig, {"base_url": url}, r"it must be http://host or http://host:port")
        for url in ("http://", "http://:80", "http://a:x", "http://a:99999", "http://[::1", "http://a b")
    ),
    (
        ServeBenchConfig,
        {"base_url": "http://a", "vllm": "x"},
        "base_url is 'http://a'; it must be given without vllm, ours and theirs",
    ),
    (ServeBenchConfig, {"request_rate": [0]}, r"request_rate\[0\] is 0; it must be a finite number > 0"),
    (ServeBenchConfig, {"dataset_name": "sharegpt"}, "dataset_name is 'sharegpt'; it must be one of random, conver"),
]


@pytest.mark.parametrize(("config", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(config: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_peers_are_those_that_flags_are_given_for() -> None:
    assert LatencyConfig().chosen_peers == ("transformers",)
    assert LatencyConfig(peers=["none"]).chosen_peers == ()
    assert LatencyConfig(vllm="python", gguf="file").chosen_peers == ("transformers", "vllm", "llama.cpp")
    assert LatencyConfig(peers=["vllm"], vllm="python").chosen_peers == ("vllm",)


def test_a_wrong_call_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--batch-size", "0"]) == 2
    assert capsys.readouterr().err == "bateleur: batch_size is 0; it must be an integer >= 1\n"
    assert main(["bench", "latency", "--num-threads", "0"]) == 2
    assert "--num-threads is 0; it must be at least 1" in capsys.readouterr().err
