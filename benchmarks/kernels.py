"""The kernels that steps of six published models launch on a Hopper GPU, without one: launches, programs, instructions.

    uv run python benchmarks/kernels.py --json benchmarks/results/kernels-sm90.json

An engine of each model starts on a fake CUDA device, with its real widths and one layer of each kind, and runs eager
steps. Every Triton launch is compiled for sm_90 with its real arguments, and not run
(`tests/plugins/compiled_cuda.py`). Recorded for each step and kernel: launches, programs, threads, ptxas's resource
usage, and blocks per multiprocessor. Instructions are counted in the machine code, in total and per loop body. No times
are measured.

`--before FILE` compares with the steps of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "plugins"), str(ROOT / "tools")]

from performance.published import MODELS  # noqa: E402

from bateleur.runner import LLM, SamplingParams  # noqa: E402
from blank_checkpoint import write_blank  # noqa: E402
from compiled_cuda import FEW_LAYERS, CompiledCuda  # noqa: E402
from sm90 import Kernel, Launch, compiling  # noqa: E402

ROWS = 64
PROMPT = 4096
"""Tokens of the prompt, limited by the size of a step."""
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
RECOMMENDED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, max_tokens=4, ignore_eos=True)


def loop_bodies(kernel: Kernel) -> list[int]:
    """Number of instructions of each loop in the machine code, inner loops included, longest first."""
    found = []
    for index, line in enumerate(kernel.sass):
        target = re.search(r"\bBRA(?:\.\w+)*\s+(?:!?\w+, )?`?\(?(?:\.L_x_\w+|0x([0-9a-f]+))", line)
        if target is not None and target[1] is not None:
            start = int(target[1], 16) // 16
            if start < index:
                found.append(index - start + 1)
    return sorted(found, reverse=True)


def rows_of(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """An entry for each kernel of a step, in the order of first launches."""
    kernels = list(dict.fromkeys(each.kernel for each in launches))
    rows = []
    for kernel in kernels:
        own = [each for each in launches if each.kernel is kernel]
        rows.append(
            {"kernel": kernel.name, "options": {k: v for k, v in kernel.options.items() if k != "PRECISION"}}
            | {"launches": len(own), "programs": sum(each.programs for each in own)}
            | kernel.usage
            | {"instructions": len(kernel.sass), "loops": loop_bodies(kernel)[:4]}
        )
    return rows


def steps_of(fake: CompiledCuda, llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[Launch]]:
    """The launches of each step of a run."""
    steps: list[list[Launch]] = []
    step = llm.engine.step

    def counted(*args: Any, **kwargs: Any) -> None:
        begin = len(fake.compiled.launches)
        step(*args, **kwargs)
        steps.append(fake.compiled.launches[begin:])

    llm.engine.step = counted  # type: ignore[method-assign]
    try:
        fake.run(llm, prompts, [params] * len(prompts), max_steps=200)
    finally:
        del llm.engine.step
    return steps


def measure(model: str, folder: Path) -> dict[str, Any]:
    """The steps of one model."""
    found: dict[str, Any] = {"layers": FEW_LAYERS[model]}
    with pytest.MonkeyPatch.context() as patch, compiling(on_device=True) as compiled:
        fake = CompiledCuda(patch, compiled)
        write_blank(folder, MODELS[model] | FEW_LAYERS[model], torch.bfloat16)
        llm = fake.start(folder, cudagraph_mode="NONE", max_num_seqs=ROWS, max_model_len=2 * PROMPT)
        found["prompt"] = rows_of(steps_of(fake, llm, [[1] * PROMPT], GREEDY)[0])
        prompts = [[row % 90 + 1] * 8 for row in range(ROWS)]  # small enough for one step
        for name, params in (("greedy", GREEDY), ("top_k 20, top_p 0.95", RECOMMENDED)):
            steps = steps_of(fake, llm, prompts, params)
            found[f"decode of {ROWS} rows, {name}"] = rows_of(steps[1])
        assert not fake.faults, fake.faults
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run one model, to test the script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path, help="JSON file of an earlier run to compare with")
    args = parser.parse_args()
    models = {}
    for model in list(FEW_LAYERS)[: 1 if args.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            models[model] = measure(model, Path(folder))
        for step, rows in models[model].items():
            if step == "layers":
                continue
            print(f"{model}, {step}: {sum(each['launches'] for each in rows)} launches")
            for each in rows:
                programs, blocks = each["programs"] // each["launches"], each["blocks_per_multiprocessor"]
                print(
                    f"  {each['kernel']:<20}{each['launches']:>3} x {programs:>7,} programs of {each['threads']:>3} "
                    f"threads, {each['registers']:>3} registers, {each['spilled_bytes']} spilled, "
                    f"{each['shared_bytes']:>7,} shared, {blocks:>2} a multiprocessor ({each['limit']}), "
                    f"{each['instructions']:>5} instructions, loops {each['loops']}"
                )
    if args.json is not None:
        command = " ".join(["python", *sys.argv])
        head = {"date": date.today().isoformat(), "command": command}
        head |= {"torch": torch.__version__, "triton": triton.__version__, "target": "sm_90"}
        before = {} if args.before is None else json.loads(args.before.read_text())
        found = head | {"models": models, "before": before.get("models", {})}
        args.json.write_text(json.dumps(found, separators=(",", ":")).replace('{"kernel"', '\n{"kernel"') + "\n")


if __name__ == "__main__":
    main()
