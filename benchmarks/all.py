"""The GPU tests, and every benchmark that says something about a GPU, in one call: GPUs are rented by the minute.

    python benchmarks/all.py OUT [--device cuda]

Needs the packages importable (an installed workspace, or PYTHONPATH over packages/*/src), torch, triton, transformers,
and pytest for the tests. Each part runs in its own process, so that one that fails leaves the others their time. All of
it ends within `--seconds`, 570 by default: the tests come last, and a part that takes more than half of what is left is
cut off. Logs and JSON lie in OUT, and the exit status is the number of parts that failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from parts import run

ROOT = Path(__file__).parents[1]


def parts(out: Path, device: str, quick: bool) -> dict[str, list[str]]:
    """Command lines by name."""

    def script(name: str, *arguments: str) -> list[str]:
        return [str(ROOT / "benchmarks" / f"{name}.py"), *arguments, "--output", str(out / f"{name}.json")]

    def bench(measure: str, name: str, *arguments: str) -> list[str]:
        common = ["--device", device, "--output-json", str(out / f"{name}.json")]
        return ["-m", "bateleur.runner", "bench", measure, *common, *arguments]

    few = ["--num-iters", "1", "--output-len", "4", "--peers", "none"]
    return {
        "host": script("host", *(["--rounds", "5"] if quick else [])),
        "attention": script("attention", "--device", device, *(["--quick"] if quick else [])),
        "sampling": script(
            "sampling", "--device", device, *(["--rows", "1", "--rounds", "3"] if quick else [])
        ),
        "mamba": script("mamba", "--device", device, *(["--quick"] if quick else [])),
        "graphs": script(
            "graphs", "--device", device, *(["--rounds", "3", "--batches", "2"] if quick else [])
        ),
        **{
            f"latency-{batch}": bench(
                "latency", f"latency-{batch}", "--batch-size", str(batch), *(few if quick else [])
            )
            for batch in ((2,) if quick else (1, 16, 128))
        },
        "throughput": bench("throughput", "throughput", *([*few, "--num-prompts", "4"] if quick else [])),
        "speculative": script(
            "speculative",
            *("--device", device, "--least", "1", "--sets", "1"),
            *(
                ["--rounds", "1", "--batches", "1", "--tokens", "16", "--queue", "2"]
                if quick
                else ["--rounds", "3"]
            ),
        ),
        # In one process: there is one device, and pytest may be all that was brought along.
        "tests": [
            *("-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib"),
            *(str(ROOT / "packages"), str(ROOT / "tests")),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that every part runs")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--seconds", type=float, default=570.0, help="in which all of it ends")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = parts(args.out, args.device, args.quick)
    if args.only:
        wanted = {name: wanted[name] for name in args.only}
    end, failed = time.perf_counter() + args.seconds, 0
    for name, command in wanted.items():
        began = time.perf_counter()
        last = name == list(wanted)[-1]
        told = run(command, args.out / f"{name}.log", (end - began) * (1.0 if last else 0.5))
        failed += told != "ok"
        print(f"{name:<12} {told}  {time.perf_counter() - began:.1f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
