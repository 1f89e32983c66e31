"""Bytes and operations of a decode step, beside sums by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bateleur.mamba import Mamba2, memory_traffic
from bateleur.runner.cache.costs import CacheCosts
from bateleur.runner.diagnose.part_facts import count_parts
from bateleur.runner.diagnose.step_costs import StepPart, default_cache_costs, experts_met, step_costs, total
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, MambaLayer, MlpLayer, ModelSpec, RouterSpec

BF16 = torch.bfloat16
EXPERTS = ExpertsLayer(num_experts=8, top_k=2, intermediate_size=24, router=RouterSpec())
STATE = Mamba2(num_heads=2, head_dim=16, state_size=16, num_groups=1)
SPEC = ModelSpec(
    architecture="Some",
    vocab_size=100,
    hidden_size=32,
    layers=(
        AttentionLayer(4, 2, 8, scale=1.0),
        MlpLayer(48),
        MambaLayer(STATE, 16, conv_bias=True, proj_bias=False, norm_eps=1e-5),
        EXPERTS,
    ),
    norm_eps=1e-5,
)


def costs(
    spec: ModelSpec = SPEC, batch: int = 3, context: int = 50, tokens: int = 1, **more: Any
) -> dict[str, StepPart]:
    model = HybridDecoder(spec, dtype=BF16, device="meta")
    return step_costs(model, default_cache_costs(spec, BF16, 256, "cuda", **more), batch, context, tokens)


def test_a_step_of_one_token_reads_what_a_token_takes() -> None:
    """Of the embeddings, the output projection and one row, and not the final norm, which is nothing beside them."""
    parts, facts = costs(batch=1), count_parts(HybridDecoder(SPEC, dtype=BF16, device="meta"))
    for kind in ("attention", "mlp", "mamba", "experts"):
        assert parts[kind].weight_bytes == pytest.approx(facts[kind].active_bytes), kind
    assert parts["embeddings"].weight_bytes == 2 * (100 * 32 + 32)
    tied = costs(replace(SPEC, tie_word_embeddings=True), batch=1)
    assert tied["embeddings"].weight_bytes == parts["embeddings"].weight_bytes


def test_attention_by_hand() -> None:
    part = costs(batch=3, context=50, tokens=1)["attention"]
    assert part.kv_bytes == 3 * 51 * 2 * 2 * 8 * 2  # keys and values of two heads of 8 lanes
    matrices = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32
    assert part.flops == 2 * 3 * matrices + 4 * 3 * 51 * 4 * 8
    inputs = (32 + 64) + (32 + 32)
    assert part.activation_bytes == 3 * 2 * (inputs + 2 * 32)
    windowed = replace(SPEC, layers=(AttentionLayer(4, 2, 8, scale=1.0, sliding_window=10),))
    assert costs(windowed, batch=3)["attention"].kv_bytes == 3 * 11 * 2 * 2 * 8 * 2


def test_experts_that_a_step_meets() -> None:
    assert experts_met(EXPERTS, 1) == pytest.approx(2)
    assert experts_met(EXPERTS, 2) == pytest.approx(2 + 2 * 6 / 8)
    assert experts_met(EXPERTS, 10_000) == pytest.approx(8)
    few, many = costs(batch=1)["experts"], costs(batch=64)["experts"]
    assert many.flops == pytest.approx(64 * few.flops)
    assert many.weight_bytes < 4.01 * few.weight_bytes, "no expert is read twice"


def test_states_are_those_of_traffic() -> None:
    """Under the default policies: FOLD with drafts, SLOTS without."""
    caches = default_cache_costs(SPEC, BF16, 256, "cuda", 3)
    assert caches.layout is not None
    (state,) = caches.options.states.specs(SPEC, BF16)
    cycle = memory_traffic.FoldCycle.of(caches.layout, 4)
    part = costs(batch=5, tokens=4, drafts=3)["mamba"]
    assert part.state_bytes == 5 * memory_traffic.fold_step_bytes(state, 4, cycle)
    (state,) = default_cache_costs(SPEC, BF16, 256, "cuda").options.states.specs(SPEC, BF16)
    assert costs(batch=5)["mamba"].state_bytes == 5 * memory_traffic.slots_step_bytes(state, 1)


def test_bounds() -> None:
    step = StepPart(weight_bytes=1e6, kv_bytes=1e6, state_bytes=1e6, activation_bytes=1e6, flops=1e9)
    assert step.bound_us(1e12) == pytest.approx(4)
    assert step.bound_us(1e12, 1e14) == pytest.approx(10)
    assert total({"a": step, "b": step}).total_bytes == 8e6


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"context": 0}, "context is 0; it must be at least 1"),
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"tokens": 2}, r"tokens is 2; it must be at most 1 \+ num_speculative_tokens = 1"),
    ],
)
def test_refusals(how: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        costs(**how)


def test_what_a_model_without_states_keeps() -> None:
    dense = replace(SPEC, layers=SPEC.layers[:2])
    caches: CacheCosts = default_cache_costs(dense, BF16, 256, "cuda")
    assert caches.layout is None
    assert total(costs(dense)).state_bytes == 0
