"""Compiles the kernels of steps on a machine without a GPU: `python -m benchmarks.gpu.precompile FOLDER [STEP ...]`.

Steps run with their real sizes and few layers on a fake H100 (`tests/plugins/compiled_cuda.py`): each launch is
compiled for sm_90 and runs nothing, so results of a step mean nothing, and are not kept. FOLDER becomes a cache of
Triton. A machine with an H100 or H200 uses it if FOLDER has the same path there, `TRITON_CACHE_DIR` names it, and
Triton's wheel is the same. Kernels that only the GPU tests launch, at odd sizes, are not in it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .plan import ROOT, make_importable, waves

make_importable()

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bateleur.runner import LLM  # noqa: E402
from compiled_cuda import CompiledCuda  # noqa: E402
from sm90 import compiling  # noqa: E402

from . import models  # noqa: E402
from .child import MODULES  # noqa: E402
from .job import Job  # noqa: E402
from .record import Record  # noqa: E402

WITHOUT_KERNELS = ("environment", "captures", "tests", "peers", "sanitizer")
BINARIES = (".cubin", ".json")


@dataclass
class DryJob(Job):
    """A job without values: calls are made once, and errors for lack of values end a part silently."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on after an error."""
        with suppress(Exception):
            yield

    def compare(self, name: str, got: Tensor, want: Tensor, bound: float, **facts: Any) -> None:
        """Compare nothing."""

    def same(self, name: str, got: Tensor, want: Tensor, why: str) -> None:
        """Compare nothing."""

    def microseconds(self, call: Callable[[], object], *, seconds: float = 0.1, graph: bool = True) -> float:
        """Make the call."""
        call()
        return 1.0

    def synchronize(self) -> None:
        """Wait for nothing."""


def compile_step(name: str) -> int:
    """Run a step, and return the number of its kernels."""
    step, _, case = name.partition(":")
    job = DryJob(step, case, False, torch.device("cuda:0"), float("inf"), Record(io.StringIO()))
    with pytest.MonkeyPatch.context() as patch, compiling(on_device=True) as compiled:
        fake = CompiledCuda(patch, compiled)
        for function in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, function, lambda *_: None)
        patch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
        patch.setattr(torch.profiler, "profile", lambda **_: nullcontext())
        patch.setattr(models, "layers_of", lambda job, name, layers=None: models.QUICK_LAYERS[name])
        patch.setattr(models, "_random", lambda *_: None)
        if step == "tokens":  # its reference is an engine on the CPU
            tokens = import_module(".steps.tokens", __package__)
            patch.setattr(tokens, "LLM", lambda **options: LLM(**options | {"device": "cuda:0"}))
        with fake.watch:
            import_module(f".steps.{MODULES.get(step, step)}", __package__).run(job)
        return len(compiled.kernels)


def keep_binaries(folder: Path) -> None:
    """Delete what only the compiler reads: five sixths of a cache."""
    for group in folder.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {k: v for k, v in paths.items() if k.endswith(BINARIES)}}))
    for path in folder.glob("*/*"):
        if path.suffix not in BINARIES:
            path.unlink()


def main() -> None:
    """Compile the kernels of all steps, or of those that are named, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.precompile", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--here", action="store_true", help="run the one step in this process")
    options = parser.parse_args()
    every = [step.name for wave in waves(False) for step in wave.steps]
    names = options.steps or [name for name in every if name.partition(":")[0] not in WITHOUT_KERNELS]
    if options.here:
        print(f"{names[0]:<40}{compile_step(names[0]):4} kernels", flush=True)
        return
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    here = [sys.executable, "-m", "benchmarks.gpu.precompile", str(folder)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = list(pool.map(lambda name: subprocess.call([*here, name, "--here"], env=environment, cwd=ROOT), names))
    keep_binaries(folder)
    sys.exit(sum(code != 0 for code in codes))


if __name__ == "__main__":
    main()
