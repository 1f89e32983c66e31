"""Time of a mixture-of-experts layer on CPU compared with transformers' module, with the same weights.

    uv run python benchmarks/experts.py --output benchmarks/results/experts-cpu.json

Each call has new tokens, so that the weights of their experts come from memory. Rounds are interleaved in changing
order. All is float32. Ours is measured with packed weights (used without CUDA graphs) and plain ones (used with
graphs). transformers has three implementations, of which its models use grouped_mm; batched_mm copies the weights for
every token and is skipped for large batches.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.models.experts import ROUTED, Experts
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.spec import ExpertsLayer, MlpLayer, RouterSpec

MODELS: dict[str, dict[str, int]] = {
    "Qwen3.5-35B-A3B": {"hidden": 2048, "experts": 256, "top_k": 8, "inner": 512, "shared": 512},
    "Granite-4.0-H-Tiny": {"hidden": 1536, "experts": 64, "top_k": 6, "inner": 512, "shared": 1024},
}
QUICK = {"hidden": 64, "experts": 8, "top_k": 2, "inner": 48, "shared": 32}
WAYS = ("grouped_mm", "eager", "batched_mm")
_MOST_COPIED = 8
_WARM_UP = 2
_SETTLE_S = 8.0
"""Seconds to wait after writing gigabytes: on virtual machines, reads of them are slow at first."""


def theirs(name: str, sizes: dict[str, int]) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """transformers' module, and its layer as a function (T, M) -> (T, M)."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    if name.startswith("Qwen"):
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

        config = AutoConfig.for_model(
            "qwen3_5_moe_text",
            hidden_size=sizes["hidden"],
            num_experts=sizes["experts"],
            num_experts_per_tok=sizes["top_k"],
            moe_intermediate_size=sizes["inner"],
            shared_expert_intermediate_size=sizes["shared"],
        )
        block = Qwen3_5MoeSparseMoeBlock(config)
        return block, lambda x: block(x[None])[0]
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP, GraniteMoeHybridMoE

    config = AutoConfig.for_model(
        "granitemoehybrid",
        hidden_size=sizes["hidden"],
        num_local_experts=sizes["experts"],
        num_experts_per_tok=sizes["top_k"],
        intermediate_size=sizes["inner"],
        shared_intermediate_size=sizes["shared"],
        mamba_n_heads=2 * sizes["hidden"] // 16,
        mamba_d_head=16,
    )
    both = torch.nn.ModuleDict({"moe": GraniteMoeHybridMoE(config), "shared": GraniteMoeHybridMLP(config)})
    return both, lambda x: both["moe"](x[None])[0] + both["shared"](x[None])[0]


def ours(sizes: dict[str, int], module: Any) -> Experts:
    """Our layer with the weights of that module."""
    qwen = hasattr(module, "shared_expert")
    spec = ExpertsLayer(
        num_experts=sizes["experts"],
        top_k=sizes["top_k"],
        intermediate_size=sizes["inner"],
        router=RouterSpec(),
        shared=MlpLayer(sizes["shared"]),
        shared_gate=qwen,
    )
    stored = dict(module.named_parameters())
    if qwen:
        up = torch.cat([stored[f"shared_expert.{part}_proj.weight"] for part in ("gate", "up")])
        parts = {
            "router_proj": stored["gate.weight"],
            "up_proj": stored["experts.gate_up_proj"],
            "down_proj": stored["experts.down_proj"],
            "shared_up_proj": up,
            "shared_down_proj": stored["shared_expert.down_proj.weight"],
            "shared_gate_proj": stored["shared_expert_gate.weight"],
        }
    else:
        parts = {
            "router_proj": stored["moe.router.weight"],
            "up_proj": stored["moe.experts.gate_up_proj"],
            "down_proj": stored["moe.experts.down_proj"],
            "shared_up_proj": stored["shared.input_linear.weight"],
            "shared_down_proj": stored["shared.output_linear.weight"],
        }
    layer = Experts(spec, torch.empty(0, sizes["hidden"]))
    for name, weight in layer.weights().items():
        if name in ROUTED:  # large: both layers share them
            setattr(layer, name, GroupedProjection(parts[name].detach()))
        else:
            weight.copy_(parts[name])
    return layer


def measure(name: str, sizes: dict[str, int], batches: list[int], rounds: int, settle_s: float) -> list[dict[str, Any]]:
    """A row per batch: median microseconds of each implementation, and ratios."""
    module, branch = theirs(name, sizes)
    config = next(each.config for each in module.modules() if hasattr(each, "has_gate"))
    for weight in module.parameters():
        weight.normal_(0.0, weight.shape[-1] ** -0.5)
    packed, plain = ours(sizes, module), ours(sizes, module)
    for projection in packed.projections.values():
        projection.pack()
    step: Any = None
    settled = time.perf_counter() + settle_s
    while time.perf_counter() < settled:
        for layer in (packed, plain):
            layer.forward(torch.randn(4, sizes["hidden"]), step)
    rows = []
    for tokens in batches:
        x = torch.randn(tokens, sizes["hidden"])
        config._experts_implementation = WAYS[0]
        wanted, found = branch(x), packed.forward(x, step)
        assert (wanted - found).abs().max() < 1e-4 * wanted.abs().max()
        ways = WAYS if tokens <= _MOST_COPIED else WAYS[:2]
        times: dict[str, list[float]] = {way: [] for way in ("packed", "plain", *ways)}
        for round_ in range(_WARM_UP + rounds):
            for way in sorted(times, key=lambda _: random.random()):
                x = torch.randn(tokens, sizes["hidden"])
                if way in WAYS:
                    config._experts_implementation = way
                began = time.perf_counter()
                if way in WAYS:
                    branch(x)
                else:
                    (packed if way == "packed" else plain).forward(x, step)
                if round_ >= _WARM_UP:
                    times[way].append(time.perf_counter() - began)
        median = {way: statistics.median(taken) * 1e6 for way, taken in times.items()}
        rows.append(
            {
                "model": name,
                "tokens": tokens,
                "us": {way: round(us, 1) for way, us in median.items()},
                "ratio": round(median[WAYS[0]] / median["packed"], 2),
                "ratio_to_their_fastest": round(min(median[way] for way in ways) / median["packed"], 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="run small sizes, to test the script")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds, settle_s = (2, 0.0) if args.quick else (args.rounds, _SETTLE_S)
    results = []
    for name, sizes in MODELS.items():
        results += measure(name, QUICK if args.quick else sizes, args.batches, rounds, settle_s)
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads, "rounds": rounds}
    if args.output:
        args.output.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
