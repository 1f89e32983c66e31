"""The steps of a bring-up run, in order. Steps of one wave run at once; a timed step has a wave of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
LLAMA, NEMOTRON, QWEN = "Llama-3.1-8B", "Nemotron-3-Nano-30B-A3B", "Qwen3.5-9B"
MODELS = (LLAMA, NEMOTRON, QWEN)
CORES = 16
UNWANTED_PLUGINS = ("benchmark", "cov", "typeguard", "jaxtyping", "anyio", "pytest_mock")


@dataclass(frozen=True)
class Step:
    """One process of a run.

    Attributes:
        name: `step` or `step:case`.
        shows: what the step finds out, for `--list`.
        seconds: time limit.
        command: arguments of the Python interpreter.
    """

    name: str
    shows: str
    seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Wave:
    """Steps that run at once."""

    title: str
    steps: tuple[Step, ...]


def waves(quick: bool) -> list[Wave]:
    """Return all steps. `quick`: small sizes."""
    flag = ("--quick",) if quick else ()

    def own(name: str, shows: str, seconds: float) -> Step:
        return Step(name, shows, seconds, ("-m", "benchmarks.gpu.child", name, *flag))

    def cases(step: str, names: tuple[str, ...], shows: str, seconds: float) -> tuple[Step, ...]:
        return tuple(own(f"{step}:{name}", shows.format(name), seconds) for name in names)

    def alone(*steps: Step) -> list[Wave]:
        return [Wave("timed alone", (step,)) for step in steps]

    recurrences = ("Nemotron-3-Nano-30B", "Nemotron-Nano-9B-v2", "Qwen3.5-9B", "Kimi-Linear-48B")
    compared = (
        *cases("attention", MODELS, "paged attention against matrix products in float32, heads of {}", 150),
        *cases("recurrences", recurrences, "recurrent operators against float64, sizes of {}", 150),
        own("sampling", "draws, truncation and verification against the CPU", 120),
        own("layers", "norms, activations, routers, experts and KV writes against float64", 120),
        own("captures", "CUDA graph backend alone: pieces, refused captures, memory that pieces keep", 90),
        *cases("tokens", ("plain", "drafts"), "the shipped model's tokens equal the CPU's, {}", 180),
    )
    packages = (("metadata", 5), ("mamba", 4), ("cudagraph", 1), ("eagle", 2), ("runner", 3))
    compiled = cases("compile", MODELS, "kernels that an engine of {} compiles; later steps find them cached", 150)
    return [
        Wave("environment", (own("environment", "versions, missing packages, ceilings of the card", 60),)),
        Wave("correctness", compared),
        Wave("GPU tests", (*(tests(name, workers) for name, workers in packages), *compiled)),
        *alone(*cases("start", MODELS, "start time and memory of {} with the default options", 75)),
        *alone(*cases("decode", MODELS, "decode steps of {} against the bytes bound", 90)),
        *alone(*cases("prompts", MODELS, "prompts of {} in steps of 2,048 and 8,192 tokens", 75)),
        *alone(*cases("drafts", (LLAMA, QWEN), "steps of {} that verify 4 drafts", 75)),
        *alone(
            *cases("kernels", ("attention", "recurrences", "sampling", "experts", "quantized"), "kernels alone: {}", 60)
        ),
        *alone(*cases("tune", ("quantized", "attention"), "launch configurations against the default: {}", 150)),
        *alone(own("peers", "FlashInfer, torch varlen attention, fla and vLLM, if installed", 120)),
        *alone(*cases("sanitizer", ("memcheck", "racecheck"), "{} over a small eager run", 150)),
    ]


def tests(package: str, workers: int) -> Step:
    """Return the step of a package's GPU tests. The tests of the folder `tests` belong to `runner`.

    workers: processes of pytest-xdist on a machine with `CORES` cores.
    """
    shows = f"GPU tests of {package}"
    command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu.pytest_report", "-pno:cacheprovider"]
    # Other plugins of an image may warn, and the project turns warnings into errors.
    command += [f"-pno:{name}" for name in UNWANTED_PLUGINS]
    command += ["-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors"]
    if find_spec("pytest_timeout") is not None:
        command += ["--timeout=120"]
    workers = workers * (os.cpu_count() or 1) // CORES
    if find_spec("xdist") is not None and workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart=4"]
    return Step(f"tests:{package}", shows, 200, (*command, *test_paths(package)))


def test_paths(package: str) -> list[str]:
    """Return the files with GPU tests, and the folders whose `conftest.py` has GPU fixtures, relative to the root."""
    folders = [ROOT / "packages" / package / "tests", *([ROOT / "tests"] if package == "runner" else [])]
    found: list[Path] = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            named = path.name == "conftest.py" or path.name.startswith("test_")
            if named and "mark.gpu" in path.read_text():
                found.append(path.parent if path.name == "conftest.py" else path)
    outermost = [path for path in found if not any(other in path.parents for other in found)]
    return sorted({str(path.relative_to(ROOT)) for path in outermost})


def select(every: list[Wave], names: list[str]) -> list[Wave]:
    """Return the waves with the named steps alone; `decode` names all of `decode:*`.

    Raises ValueError for a name of no step.
    """
    known = [step.name for wave in every for step in wave.steps]
    for name in names:
        if not any(name in (each, each.partition(":")[0]) for each in known):
            raise ValueError(f"steps={name!r}: must be one of {', '.join(known)}; --list describes them")
    if not names:
        return every
    chosen = [
        Wave(wave.title, tuple(step for step in wave.steps if {step.name, step.name.partition(":")[0]} & {*names}))
        for wave in every
    ]
    return [wave for wave in chosen if wave.steps]


def paths() -> list[str]:
    """Return the folders that a step must be able to import from, with the project's packages first."""
    sources = sorted(str(path) for path in ROOT.glob("packages/*/src"))
    return [*sources, str(ROOT), *(str(ROOT / name) for name in ("benchmarks", "tools", "tests/plugins"))]


def make_importable() -> None:
    """Put `paths()` in front of the module search path of this process."""
    sys.path[:0] = [path for path in paths() if path not in sys.path]
