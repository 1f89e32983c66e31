"""The GPU tests, and every benchmark that says something about a GPU, in one call: GPUs are rented by the minute.

    python benchmarks/all.py OUT [--device cuda]

Needs the packages importable (an installed workspace, or PYTHONPATH over packages/*/src), torch, triton, transformers,
and pytest for the tests. Each part runs in its own process, so that one that fails leaves the others their time; logs
and JSON lie in OUT, and the exit status is the number of parts that failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def parts(out: Path, device: str, quick: bool) -> dict[str, list[str]]:
    """Command lines by name."""

    def script(name: str, *arguments: str) -> list[str]:
        return [str(ROOT / "benchmarks" / f"{name}.py"), *arguments, "--output", str(out / f"{name}.json")]

    return {
        # In one process: there is one device, and pytest may be all that was brought along.
        "tests": [
            *("-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib"),
            *(str(ROOT / "packages"), str(ROOT / "tests")),
        ],
        "host": script("host", *(["--rounds", "5"] if quick else [])),
        "attention": script("attention", "--device", device, *(["--quick"] if quick else [])),
        "mamba": script("mamba", "--device", device, *(["--quick"] if quick else [])),
        "speculative": script(
            "speculative",
            *("--device", device),
            *(["--rounds", "1", "--batches", "1", "--tokens", "16"] if quick else []),
        ),
        "graphs": script(
            "graphs", "--device", device, *(["--rounds", "3", "--batches", "2"] if quick else [])
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that every part runs")
    parser.add_argument("--only", nargs="+", metavar="PART")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, command in parts(args.out, args.device, args.quick).items():
        if args.only and name not in args.only:
            continue
        began = time.perf_counter()
        with (args.out / f"{name}.log").open("w") as log:
            code = subprocess.run(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        failed += code != 0
        print(f"{name:<10} {'ok' if code == 0 else f'exit {code}'}  {time.perf_counter() - began:.1f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
