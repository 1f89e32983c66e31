"""The memory estimate of steps is left free on a device."""

from __future__ import annotations

import pytest
import torch

from bateleur.runner.cache.costs import graph_bytes, workspace_bytes
from bateleur.runner.config.engine_config import CacheConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.setup import _left
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, MlpLayer, ModelSpec, RouterSpec
from bateleur.runner.offload.copies import STAGING_BYTES

VOCAB, WIDTH, ROWS, DRAFTS = 248_320, 2048, 256, 4
ATTENTION = AttentionLayer(16, 2, 128, 0.09)
DENSE = ModelSpec("Dense", VOCAB, WIDTH, (ATTENTION, MlpLayer(8192)), 1e-5)
SPARSE = ModelSpec(
    "Sparse",
    VOCAB,
    WIDTH,
    (ATTENTION, ExpertsLayer(num_experts=64, top_k=8, intermediate_size=768, router=RouterSpec())),
    1e-5,
)
LIMITS = EngineLimits(131_072, ROWS, 8192, DRAFTS)


def described(spec: ModelSpec) -> HybridDecoder:
    return HybridDecoder(spec, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "experts"])
def test_what_a_step_allocates_is_counted(spec: ModelSpec) -> None:
    logits = ROWS * (1 + DRAFTS) * VOCAB * (4 + 2)
    penalties = ROWS * VOCAB * 5
    tables = 2 * ROWS * (131_072 // 16) * 4
    wide = 8192 * 2 * (2 * 8192 if spec is DENSE else 8 * 2 * 768)
    stream = 8192 * WIDTH * (4 + 2 + 2)
    found = workspace_bytes(described(spec), LIMITS, 16, 512)
    assert found > logits + penalties + tables + wide + stream
    assert found < 12 << 30, "and yet an H100 has room for weights"


def test_experts_see_the_tokens_of_all_ranks() -> None:
    apart = HybridDecoder(SPARSE, dtype=torch.bfloat16, device="meta", data_ranks=Ranks(0, 4, "none"))
    assert (
        workspace_bytes(apart, LIMITS, 16, 512)
        > workspace_bytes(described(SPARSE), LIMITS, 16, 512) + 3 * 8192 * 8 * 2 * 768
    )


def test_fewer_rows_and_tokens_need_less() -> None:
    model = described(DENSE)
    whole = workspace_bytes(model, LIMITS, 16, 512)
    assert workspace_bytes(model, EngineLimits(131_072, ROWS, 4096, DRAFTS), 16, 512) < whole
    assert workspace_bytes(model, EngineLimits(131_072, 16, 8192, DRAFTS), 16, 512) < whole / 2


def test_graphs_take_what_their_largest_key_does() -> None:
    model = described(DENSE)
    without = workspace_bytes(model, LIMITS, 16, 0)
    for tokens in (8, 512):
        graphs = graph_bytes(model, LIMITS, tokens)
        assert workspace_bytes(model, LIMITS, 16, tokens) == without + graphs
        assert graphs > tokens * 2 * 8192 + ROWS * (1 + DRAFTS) * VOCAB * 4
    assert graph_bytes(model, LIMITS, 0) == 0


def test_caches_get_what_steps_leave() -> None:
    total, free, needed = 24 << 30, 22 << 30, 3 << 30
    left = int(free - (1.0 - 0.9) * total) - needed
    assert _left(CacheConfig(), (free, total), needed) == left
    offloads = CacheConfig(kv_offload_bytes=1, enable_prefix_caching=True)
    assert _left(offloads, (free, total), needed) == left - 2 * STAGING_BYTES
    with pytest.raises(
        ValueError,
        match=r"^gpu_memory_utilization=0\.9: of \d+ bytes \d+ are free, and steps and graphs need 3221225472",
    ):
        _left(CacheConfig(), (5 << 30, total), needed)
