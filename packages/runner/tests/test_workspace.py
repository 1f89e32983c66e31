"""What steps take beside weights and caches is left for them on a device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bateleur.runner.cache.workspace import workspace_bytes
from bateleur.runner.config.engine_config import CacheConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.engine.setup import _budget
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, MlpLayer, ModelSpec, RouterSpec
from bateleur.runner.parallel.ranks import Ranks

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
    found = workspace_bytes(described(spec), LIMITS, 16)
    assert found > logits + penalties + tables + wide + stream
    assert found < 12 << 30, "and yet an H100 has room for weights"


def test_experts_see_the_tokens_of_all_ranks() -> None:
    apart = HybridDecoder(SPARSE, dtype=torch.bfloat16, device="meta", data_ranks=Ranks(0, 4, "none"))
    assert (
        workspace_bytes(apart, LIMITS, 16)
        > workspace_bytes(described(SPARSE), LIMITS, 16) + 3 * 8192 * 8 * 2 * 768
    )


def test_fewer_rows_and_tokens_need_less() -> None:
    model = described(DENSE)
    whole = workspace_bytes(model, LIMITS, 16)
    assert workspace_bytes(model, EngineLimits(131_072, ROWS, 4096, DRAFTS), 16) < whole
    assert workspace_bytes(model, EngineLimits(131_072, 16, 8192, DRAFTS), 16) < whole / 2


@dataclass
class Elsewhere:
    """A model on a device that is not here."""

    spec: ModelSpec
    dtype: torch.dtype = torch.bfloat16
    exchange: None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def weights(self) -> dict[str, torch.Tensor]:
        return described(self.spec).weights()


def test_caches_get_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 24 GB: a tenth of it is less than 256 rows of 248,320 logits take."""
    total, free = 24 << 30, 22 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    model, few = Elsewhere(DENSE), EngineLimits(131_072, 32, 2048)
    budget = _budget(CacheConfig(), model, few)  # type: ignore[arg-type]
    assert budget == int(free - (1.0 - 0.9) * total) - workspace_bytes(described(DENSE), few, 16)
    assert _budget(CacheConfig(kv_cache_memory_bytes=7), model, few) == 7  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 << 30, total))
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization is 0\.9; of \d+ bytes \d+ are free, and steps need"
    ):
        _budget(CacheConfig(), model, LIMITS)  # type: ignore[arg-type]
