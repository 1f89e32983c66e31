"""Greedy decoding of one request with int8 and int4 weights, compared with bfloat16 and optionally llama.cpp, on a CPU.

    uv run python benchmarks/quantized.py --llama-cpp VENV/bin/python --output OUT.json

The checkpoints are Llamas with random weights and the sizes of SmolLM-135M and Llama-3.2-1B. int8 has a scale for each
row, int4 for 128 or 64 columns; both also for `lm_head`. llama.cpp gets GGUF files of Q8_0 and Q4_0. Each engine runs
in its own process, in interleaved rounds; a ratio is the median over rounds of the step time with bfloat16 weights and
tokens divided by the engine's step time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bateleur.runner.bench.peers import EngineProcess, Task, run_interleaved, run_script

SIZES: dict[str, dict[str, int]] = {
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
GGUF = {"I8": "Q8_0", "I4": "Q4_0"}


def quantized(name: str, weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """The tensors of compressed-tensors for a weight (N, K)."""
    x = weight.float().unflatten(1, (-1, group))
    scale = (x.abs().amax(-1) / (2 ** (bits - 1) - 1)).bfloat16()
    codes = (x / scale.float().unsqueeze(-1)).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1).flatten(1).int()
    stem = name.removesuffix("weight")
    if bits == 8:
        return {name: codes.to(torch.int8), f"{stem}weight_scale": scale}
    nibbles = (codes + 8).unflatten(1, (-1, 8)) << (4 * torch.arange(8, dtype=torch.int32))
    words = nibbles.sum(-1, dtype=torch.int32)
    shape = torch.tensor(weight.shape)
    return {f"{stem}weight_packed": words, f"{stem}weight_scale": scale, f"{stem}weight_shape": shape}


def write_checkpoints(folder: Path, size: str) -> None:
    """Write folders bfloat16, float16 (for `write_gguf.py`), I8 and I4."""
    config = LlamaConfig(**SIZES[size], max_position_embeddings=2048, tie_word_embeddings=True, dtype="bfloat16")
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).state_dict()
    torch.manual_seed(0)
    ones = {name: torch.ones(each.shape) for name, each in empty.items() if each.ndim == 1}
    plain = {name: torch.randn(each.shape).mul_(0.03).bfloat16() for name, each in empty.items() if each.ndim == 2}
    head = plain.pop("lm_head.weight")
    group = 128 if config.hidden_size % 128 == 0 else 64

    def write(name: str, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config.to_dict() | more))

    write("bfloat16", {**ones, **plain}, {})
    write("float16", {name: each.half() for name, each in (ones | plain).items()}, {})
    for name, bits in (("I8", 8), ("I4", 4)):
        tensors = {**ones, "model.embed_tokens.weight": plain["model.embed_tokens.weight"]}
        for key, weight in {**plain, "lm_head.weight": head}.items():
            if key not in tensors:
                tensors |= quantized(key, weight, bits, weight.shape[1] if bits == 8 else group)
        form = "int-quantized" if bits == 8 else "pack-quantized"
        weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
        weights |= {} if bits == 8 else {"strategy": "group", "group_size": group}
        fields: dict[str, Any] = {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}}
        }
        fields |= {"quant_method": "compressed-tensors", "format": form, "ignore": []}
        write(name, tensors, {"quantization_config": fields, "tie_word_embeddings": False})


def compare(folder: Path, python: str | None, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Speeds and ratios of the engines."""
    task, engines = Task([[(13 * j) % 1000 + 5 for j in range(8)]], [tokens]), []

    def start(engine: str, name: str, python: str = sys.executable, **more: Any) -> None:
        options = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 1,
            "skip_tokenizer_init": True,
        } | more
        settings = {"model": str(folder / name), "options": options, **options, "num_threads": threads}
        engines.append(EngineProcess(engine, settings | {"gguf": str(folder / f"{name}.gguf")}, python))
        engines[-1].name = f"{engine} {name}"

    start("bateleur", "bfloat16", dtype="bfloat16")
    start("bateleur", "I8")
    start("bateleur", "I4")
    for name in GGUF.values() if python is not None else ():
        assert python is not None
        script = Path(__file__).with_name("write_gguf.py")
        run_script(python, script, str(folder / "float16"), str(folder / f"{name}.gguf"), name)
        start("llama.cpp", name, python)
    whole, first = run_interleaved(engines, [task, task.first_token_only()], rounds, warm_ups=1)
    seconds = {}
    for engine in engines:
        if fault := whole[engine.name].fault(task):
            raise RuntimeError(f"{engine.name}: {fault}")
        pairs = zip(whole[engine.name].runs, first[engine.name].runs, strict=True)
        seconds[engine.name] = [(run.seconds - start.seconds) / (tokens - 1) for run, start in pairs]
        engine.close()
    base = seconds["bateleur bfloat16"]
    return {
        name: {
            "tokens_per_s": 1 / statistics.median(each),
            "ratio": statistics.median(wide / own for wide, own in zip(base, each, strict=True)),
        }
        for name, each in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", help="Python interpreter of an environment with llama-cpp-python and gguf")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {args.threads} threads, load {os.getloadavg()[0]:.1f}"}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoints(Path(folder), size)
            found[size] = compare(Path(folder), args.llama_cpp, args.tokens, args.rounds, args.threads)
        for name, row in found[size].items():
            print(f"{size:>5} {name:18} {row['tokens_per_s']:7.1f} tok/s {row['ratio']:5.2f}x", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
