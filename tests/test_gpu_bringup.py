"""The bring-up of `benchmarks/gpu` without a GPU: it ends, reports what it skipped, and a failing step affects only
itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STEPS = ("captures", "layers", "recurrences:Qwen3.5-9B", "sanitizer:memcheck")
RECORD = "from benchmarks.gpu.record import Record; record = Record.to_runner(); "


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    """Make `benchmarks.gpu`, which runs from the project's root, importable."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


@pytest.fixture(scope="module")
def run(importable: None) -> ModuleType:
    """The module `benchmarks.gpu.run`."""
    from benchmarks.gpu import run

    return run


def command(output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.gpu --quick` without the workspace's path: it has to find the packages itself."""
    line = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--seconds", "280", "--output", str(output), *more]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def begun(output: Path) -> Counter[str]:
    return Counter(line["step"] for line in lines_of(output) if line.get("event") == "begin")


@pytest.mark.slow
def test_a_run_ends_and_a_second_one_resumes(tmp_path: Path) -> None:
    done = command(tmp_path, *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert begun(tmp_path) == dict.fromkeys(STEPS, 1)
    lines = lines_of(tmp_path)
    ends = {line["step"]: line for line in lines if line.get("event") == "end"}
    assert {name: end["unfinished"] for name, end in ends.items()} == dict.fromkeys(STEPS, False)
    held = Counter(line["step"] for line in lines if line.get("status") == "ok")
    assert held["layers"] > 30
    assert held["recurrences:Qwen3.5-9B"] > 40
    assert held["captures"] >= 3
    text = (tmp_path / "summary.txt").read_text()
    assert text.startswith("0 steps failed; 4 ended, 0 are not done; 0 checks failed")
    assert "this machine has no CUDA device: " in text
    reasons = next(line for line in text.splitlines() if "no CUDA device" in line)
    assert "captures" in reasons
    assert "sanitizer:memcheck" in reasons
    assert text in done.stdout + "\n"
    files = [*tmp_path.iterdir()]
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) < 16 << 20

    again = command(tmp_path, *STEPS)
    assert again.returncode == 0
    assert begun(tmp_path) == dict.fromkeys(STEPS, 1), "steps that ended are skipped"
    assert (tmp_path / "summary.txt").read_text() == text
    assert command(tmp_path, "--again", "sanitizer").returncode == 0
    assert begun(tmp_path)["sanitizer:memcheck"] == 2

    other = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path), "captures"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert other.returncode == 2
    assert "holds a run with --quick" in other.stderr


def test_steps_are_listed_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    listed = command(tmp_path, "--list")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]
    page = (ROOT / "docs" / "gpu.md").read_text()
    for name in names:
        step = name.partition(":")[0]
        assert f"| `{step}` |" in page or f"| `{name}` |" in page, f"docs/gpu.md does not describe {name}"
    assert {*STEPS, "environment", "tests:runner", "decode:Qwen3.5-9B", "peers"} <= {*names}
    refused = command(tmp_path, "decodes")
    assert refused.returncode == 2
    assert "steps='decodes': must be one of environment, " in refused.stderr


HANG = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print("child", child.pid, flush=True)
time.sleep(600)
"""
FLOOD = """
import sys
for i in range(200_000):
    print("line", i, "x" * 100)
print("y" * (8 << 20))
print("the end", flush=True)
record.check("after the flood", True)
for _ in range(9000):
    record.figure("many")
"""


@pytest.mark.slow
def test_a_bad_step_costs_only_itself(tmp_path: Path, run: ModuleType) -> None:
    """One step exits, one is killed, one hangs with a child in another process group, one floods the log."""
    from benchmarks.gpu.plan import Step, Wave
    from benchmarks.gpu.report import failed_steps, summary

    def step(name: str, code: str, seconds: float = 60.0) -> Step:
        return Step(name, "", seconds, ("-c", RECORD + code))

    exits = step("exits", "print('because'); raise SystemExit(3)")
    killed = step("killed", "import os; record.figure('so far'); os.kill(os.getpid(), 9)")
    wrong = step("wrong", "record.check('sum', False, '1 + 1 is 3')")
    hangs = Step("hangs", "", 2.0, ("-c", HANG))
    floods = step("floods", FLOOD)
    good = step("good", "record.check('sum', True); record.figure('time', key=True, us=3.25)")
    waves = [Wave("", (exits, killed, hangs, floods)), Wave("", (wrong, good))]
    began = time.monotonic()
    runner = run.Runner(tmp_path, began + 90, quick=True)
    runner.run(waves, set())
    runner.close()
    assert time.monotonic() - began < 60
    assert runner.ended == {"exits", "killed", "hangs", "floods", "wrong", "good"}
    assert sorted(failed_steps(runner.lines)) == ["exits", "floods", "hangs", "killed", "wrong"]
    why = {line["step"]: line["why"] for line in runner.lines if line.get("status") == "failed"}
    assert why["exits"] == "exit status 3: because"
    assert why["killed"].startswith("killed by signal 9")
    assert why["hangs"] == "did not end within its limit of 2 s"
    kept = sum(line.get("step") == "floods" and "name" in line for line in runner.lines) - 1
    assert 1000 < kept < 9000
    assert why["floods"].startswith(f"{9001 - kept} results were dropped: ")
    assert (tmp_path / run.RESULTS).stat().st_size < 2 * run.RESULT_BYTES
    log = (tmp_path / "log.txt").read_text()
    assert len(log) < 4 * run.LOG_BYTES
    assert "[floods] line 0 " in log
    assert "[floods] the end" in log
    assert "bytes are left out" in log
    pid = int(log.partition("[hangs] child ")[2].split()[0])
    assert ended(pid), "the child of a step that hangs ends with it"
    text = summary(run.latest(runner.lines), [step.name for wave in waves for step in wave.steps])
    assert text.startswith("5 steps failed; 6 ended, 0 are not done")
    assert text.index("1 + 1 is 3") < text.index("good: time: us 3.25")


def ended(pid: int) -> bool:
    """Whether a killed process soon is gone or a zombie."""
    status, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 10
    while time.monotonic() < end:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_what_had_no_time_runs_when_the_run_is_resumed(tmp_path: Path, run: ModuleType) -> None:
    from benchmarks.gpu.plan import Step, Wave
    from benchmarks.gpu.report import failed_steps, summary

    slow = Step("slow", "", 60.0, ("-c", RECORD + "record.figure('before'); import time; time.sleep(20)"))
    later = Step("later", "", 60.0, ("-c", RECORD + "record.check('good', True)"))
    fast = Step("slow", "", 60.0, ("-c", RECORD + "record.figure('after')"))
    first = run.Runner(tmp_path, time.monotonic() + run.LEAST_SECONDS + 4, quick=True)
    first.run([Wave("", (slow,)), Wave("", (later,))], set())
    first.close()
    assert first.ended == set()
    assert not failed_steps(first.lines)
    text = summary(run.latest(first.lines), ["slow", "later"])
    assert "no time was left: slow" in text
    assert "not begun: no time was left: later" in text
    with (tmp_path / run.RESULTS).open("a") as results:
        results.write('{"step": "slow", "na')  # as if the runner was killed while writing
    second = run.Runner(tmp_path, time.monotonic() + 60, quick=True)
    assert second.ended == set()
    second.run([Wave("", (fast,)), Wave("", (later,))], second.ended)
    second.close()
    assert second.ended == {"slow", "later"}
    names = [line["name"] for line in run.latest(second.lines) if "name" in line]
    assert names == ["after", "good"], "an attempt that was cut off is replaced"


def test_a_runner_that_is_stopped_ends_its_steps(tmp_path: Path, run: ModuleType) -> None:
    from benchmarks.gpu.plan import Step, Wave

    hangs = Step("hangs", "", 60.0, ("-c", HANG))
    runner = run.Runner(tmp_path, time.monotonic() + 60, quick=True)
    thread = threading.Thread(target=runner.run, args=([Wave("", (hangs,)), Wave("", (hangs,))], set()))
    thread.start()
    log = tmp_path / run.LOG
    while thread.is_alive() and b"child" not in log.read_bytes():
        time.sleep(0.05)
    runner.stop()
    thread.join(20)
    assert not thread.is_alive()
    runner.close()
    assert runner.ended == set()
    assert ended(int(log.read_text().split()[-1]))


def test_the_summary_is_one_page_with_failures_first() -> None:
    from benchmarks.gpu.report import MOST_CHARACTERS, summary

    lines: list[dict[str, Any]] = []
    for step in range(60):
        lines += [
            {"step": f"step {step}", "name": f"check {i}", "status": "failed", "why": "y" * 400} for i in range(30)
        ]
        facts = {"us": 1 / 3, "of_bound": 0.5}
        lines += [{"step": f"step {step}", "name": f"time {i}", "status": "figure", "facts": facts} for i in range(30)]
        lines += [{"step": f"step {step}", "name": f"gone {i}", "status": "skipped", "why": f"{i}"} for i in range(30)]
        lines.append({"event": "end", "step": f"step {step}", "how": "ended", "took": 3.0, "unfinished": False})
    text = summary(lines, [f"step {step}" for step in range(61)])
    assert len(text) <= MOST_CHARACTERS == 11_000
    assert text.startswith("60 steps failed; 60 ended, 1 are not done; 1800 checks failed, 0 hold, 1800 skipped")
    assert text.index("check 0") < text.index("gone 0") < text.index("us 0.3333")
    assert "step 0: 26 more failures" in text
    assert "more failures\n\nSKIPPED" in text
    assert "more figures: results.jsonl" in text


TESTS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_some(i):
    if i == 0:
        pytest.skip("needs luck")
    assert i != 1, "one is wrong"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("seconds", "passed"), [(600, 1), (-1, 0)])
def test_results_of_tests_reach_the_runner(tmp_path: Path, seconds: int, passed: int, workers: int) -> None:
    """A test session without time ends after one test, and that is not a failure."""
    from benchmarks.gpu.record import DEADLINE

    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-p", "benchmarks.gpu.pytest_report", "-p", "no:cacheprovider"]
    options += ["-n", str(workers)] if workers else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), DEADLINE: str(time.time() + seconds)},
    )  # fmt: skip
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"name"' in line]
    by_name = {line["name"]: line for line in lines}
    assert by_name["1 tests"]["why"] == "needs luck"
    counts = by_name["tests"]["facts"]
    assert (counts.get("skipped"), counts.get("passed", 0)) == (1, passed)
    if passed:
        assert done.returncode == 1
        assert by_name["test_some.py::test_some[1]"]["why"] == "AssertionError: one is wrong"
        assert counts["failed"] == 1
    else:
        assert done.returncode == 0
        assert by_name["the other tests"]["why"] == "no time was left"


BARE = """
import importlib.machinery, sys
finder = importlib.machinery.PathFinder
find = finder.find_spec
missing = {"fastapi", "openai", "playwright", "uvicorn", "prometheus_client", "ray", "psutil", "llguidance", "pyarrow"}
finder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] in missing else find(name, *rest))
import pytest
line = "-q -n0 --collect-only -p no:cacheprovider -m gpu packages tests"
sys.exit(pytest.main([*line.split(), "-o", "addopts=--import-mode=importlib --strict-markers -rs"]))
"""


@pytest.mark.slow
def test_gpu_tests_are_collected_without_the_packages_that_a_gpu_machine_lacks() -> None:
    """Every GPU test is also part of a step."""
    from benchmarks.gpu.plan import test_paths

    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "serve: needs packages that are not installed: fastapi, psutil, uvicorn" in done.stdout
    files = {ROOT / line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(files) > 25
    assert ROOT / "tests" / "test_gpu.py" in files
    packages = ("metadata", "mamba", "cudagraph", "eagle", "runner")
    steps = {ROOT / path for package in packages for path in test_paths(package)}
    for file in files:
        assert file in steps or steps & {*file.parents}, f"{file} is in no step"
