"""Latency and throughput of the server compared with `vllm serve`, with the same client.

    uv run python benchmarks/serve.py --vllm VENV/bin/python --output benchmarks/results/serve-cpu.json

Runs `bateleur bench serve` on the checkpoint of `benchmarks/rival.py`, or --model DIR, in float32 and with prefix
caching for bateleur. Workloads: prompts that share nothing, and conversations whose turns share their history. Without
--vllm only bateleur is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rival import write_checkpoint

from bateleur.runner.bench.config import ServeBenchConfig
from bateleur.runner.bench.serve import bench_serve, serve_table

THEIRS = "--enforce-eager --no-enable-prefix-caching"
"""With prefix caching, vLLM 0.32 for CPU fails at the second turn of a conversation: IndexError in mamba_mixer2.py."""
WORKLOADS = {"singles": "random", "conversations": "conversations"}
OPTIONS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 32, "device": "cpu"}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 6.0])
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", default="--enable-prefix-caching", help="further arguments of bateleur serve")
    parser.add_argument("--theirs", default=THEIRS, help="further arguments of vllm serve")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    command = " ".join(["python", *("VENV/bin/python" if arg == args.vllm else arg for arg in sys.argv)])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder)
        if args.model is None:
            write_checkpoint(model)
        for kind in args.workloads:
            config = ServeBenchConfig(
                vllm=args.vllm,
                ours=args.ours,
                theirs=args.theirs,
                dataset_name=WORKLOADS[kind],
                num_prompts=args.requests,
                request_rate=args.rates,
                random_output_len=args.tokens,
                num_iters=args.rounds,
            )
            found = bench_serve(model, config, OPTIONS, say, command)
            print(serve_table(found), end="", flush=True)
            rows = [row | {"workload": kind} for row in found.pop("results")]
            result = found | {"results": [*result.get("results", ()), *rows]}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
