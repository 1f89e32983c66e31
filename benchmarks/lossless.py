"""Chi-square tests of the joint distribution of three emitted tokens, under every acceptance rule.

    python benchmarks/lossless.py --output benchmarks/results/lossless.json

Target and head are Markov chains over five tokens, so the exact distribution of every text is known. `loop` drafts and
verifies without an engine. `engine` uses a whole engine with a one-layer Llama whose logits are a row of a table, in
these cases: many requests, few requests, different draft lengths, preemption, and CUDA graphs. z is normal if the
distribution is right. `same` counts requests with the same tokens as in another batch of another engine, and `again`
those with the same tokens in a second run of the same engine. In `places unnamed` the noise keys of BLOCK have the
position only: a fault that the test must find.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from bateleur.eagle import Keys, Logits, OneHot, PolicyRows, Rule, TargetNeeds
from bateleur.eagle.heads import LoadReport
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.spec_decode.draft_head import DraftHead

sys.path.append(str(Path(__file__).parents[1] / "packages/eagle/tests"))
from eagle_doubles.heads import MarkovHead
from eagle_doubles.markov import Toy, chi_square, exact_law, simulate

V, SIZE, K, LENGTH = 5, 8, 3, 3
KINDS: dict[str, dict[str, Any]] = {
    "many": {"max_num_seqs": 512},
    "few": {"max_num_seqs": 24, "max_num_batched_tokens": 128},
    "ragged": {"max_num_seqs": 100},
    "preempted": {"max_num_seqs": 24, "block_size": 2},
    "graphs": {
        "max_num_seqs": 24,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [4, 16, 24 * (1 + K)],
    },
}


def toy() -> Toy:
    """A flat target, and a head with a strong preference, which makes faults easy to see."""
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randn(V, V, generator=generator, dtype=torch.float64) for _ in "td"]
    return Toy((0.5 * tables[0]).softmax(-1), (2 * tables[1]).softmax(-1))


TOY = toy()
# The first token of a request has no draft, so the tokens after it are compared.
LAW = exact_law(TOY.target, 1 + LENGTH).view(V, -1).sum(0)


class Head(MarkovHead):
    """A head with a table (V, Vd); `ids` (Vd,) are the target ids of a reduced vocabulary."""

    def __init__(self, law: Tensor, ids: Tensor | None = None) -> None:
        table = law.log().float()
        super().__init__(table if ids is None else table[:, ids])
        self.target_ids = ids
        self.spec = SimpleNamespace(
            needs=TargetNeeds(hidden=True),
            hidden_size=2,
            num_layers=1,
            num_kv_heads=1,
            head_dim=SIZE,
            vocab_size=V,
            draft_vocab_size=V if ids is None else len(ids),
            max_positions=None,
            sliding_window=None,
        )


def write_target(folder: Path) -> None:
    """Write a checkpoint whose logits after token v are row v of the table."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": SIZE,
        "rms_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    lm_head = torch.zeros(V, SIZE)
    lm_head[:, :V] = TOY.target.log().T * SIZE**-0.5  # the norm scales a unit vector by SIZE ** 0.5
    zeros, ones, layer = torch.zeros(SIZE, SIZE), torch.ones(SIZE), "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.eye(V, SIZE),
        "model.norm.weight": ones,
        "lm_head.weight": lm_head,
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones,
        **{f"{layer}self_attn.{name}_proj.weight": zeros for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": zeros for name in ("gate", "up", "down")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


class Ragged:
    """Draft policy with a different number of drafts for every row, and none in every fourth step."""

    def __init__(self) -> None:
        self.random, self.step = np.random.default_rng(3), 0

    def lengths(self, rows: PolicyRows) -> NDArray[np.int32]:
        self.step += 1
        drawn = self.random.integers(0, rows.max_drafts + 1, len(rows.max_drafts))
        return np.minimum(drawn, self.step % 4).astype(np.int32)


def engine(target: Path, rule: str | None, law: Tensor = TOY.draft, **settings: Any) -> LLM:
    """An engine of the target with K drafts of a head with the table `law`; without a rule it has no drafts."""
    ids = settings.pop("ids", None)
    base: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 32,
        "max_num_seqs": 512,
        "block_size": 4,
        "kv_cache_memory_bytes": 8_000_000,
        "skip_tokenizer_init": True,
    }
    if rule is not None:
        report = LoadReport(target, layout="target", kind="a table", own=(), shared=(), unused=())
        model: Any = DraftHead(Head(law, ids), report)
        base |= {"drafter": model, "num_speculative_tokens": K, "speculative_rule": rule}
    return LLM(target, **(base | settings))


def small(llm: LLM, num_blocks: int) -> int:
    """Bytes of KV cache for so many blocks."""
    plan = llm.cache_plan
    return plan.total_bytes - plan.kv_bytes + num_blocks * plan.kv_bytes // plan.num_blocks


def texts(llm: LLM, count: int) -> Tensor:
    """(count, LENGTH) tokens after the first one, for as many seeds. K more are generated, so that the last ones have
    drafts.
    """
    prompts: Any = [{"prompt_token_ids": [0]}] * count
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=1 + LENGTH + K, ignore_eos=True) for seed in range(count)
    ]
    return torch.tensor([each.outputs[0].token_ids for each in llm.generate(prompts, params)])[:, 1 : 1 + LENGTH]


def position_alone(rule: Rule, seeds: Tensor, positions: Tensor, place: int | Tensor) -> Keys:
    """The noise keys of BLOCK with a fault: they have the position alone, as for the other rules."""
    return Keys(seeds, positions)


def of_loop(rule: Rule, count: int, kind: type[Logits] | type[OneHot], *, ragged: bool = False) -> dict[str, Any]:
    """About a million sequences without an engine; the first token is drafted, too."""
    run = simulate(TOY, rule, count, LENGTH, K, kind=kind, ragged=ragged)
    fit = chi_square(run.tokens, exact_law(TOY.target, LENGTH), V)
    return {"z": round(fit.z, 2), "chi2/df": round(fit.statistic / fit.freedom, 3), "texts": count}


def of_engine(target: Path, rule: str, kind: str, count: int, first: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """Tokens of an engine, in two runs. `first` are those of another engine."""
    settings = dict(KINDS[kind])
    if kind == "ragged":
        settings["draft_policy"] = Ragged()
    if kind == "preempted":
        settings["kv_cache_memory_bytes"] = small(engine(target, rule, **settings), 30)
    llm = engine(target, rule, **settings)
    found = texts(llm, count)
    fit, again = chi_square(found, LAW, V), texts(llm, count)
    result = {"z": round(fit.z, 2), "chi2/df": round(fit.statistic / fit.freedom, 3), "texts": count}
    result["preemptions"] = llm.get_metrics().num_preemptions
    if kind != "ragged":
        result["same"] = count if first is None else int((found == first).all(1).sum())
        result["again"] = int((found == again).all(1).sum())
    return result, found


def measure(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every figure with its name."""
    for rule in (Rule.RATIO, Rule.BLOCK):
        for law, ragged in product((Logits, OneHot), (False, True)):
            name = f"{rule.value}, loop, {law.__name__}{', ragged' if ragged else ''}"
            yield name, of_loop(rule, 10 * count, law, ragged=ragged)
    with patch.object(Rule, "keys", position_alone):
        yield "block, loop, Logits, places unnamed", of_loop(Rule.BLOCK, 10 * count, Logits)
    with TemporaryDirectory() as folder:
        write_target(Path(folder))
        for rule in Rule:
            first = None
            for kind in KINDS:
                result, found = of_engine(Path(folder), rule.value, kind, count, first)
                first = found if first is None else first
                yield f"{rule.value}, engine, {kind}", result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=30_000, help="requests per engine; loops run ten times as many")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "draft_policy is .*Ragged")
    began, results = time.perf_counter(), {}
    for name, result in measure(args.requests):
        results[name] = result
        print(f"{name:<40}" + "".join(f"{key:>13} {value}" for key, value in result.items()), flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if args.output:
        told = {"date": str(date.today()), "torch": torch.__version__, "results": results}
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
