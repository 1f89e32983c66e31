"""Defaults of the limits of a step, and which steps run on graphs by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bateleur.cudagraph import CudaGraphMode
from bateleur.metadata import GraphSupport
from bateleur.runner.cache.costs import workspace_bytes
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.distributed.ranks import ALONE
from bateleur.runner.engine.setup import _CacheSizes
from bateleur.runner.model_runner.graph_dispatcher import (
    default_capture_sizes,
    gaps_of_drafts,
    largest_capture,
    make_dispatcher,
)
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, MlpLayer, ModelSpec

SPEC = ModelSpec(
    "Dense", 248_320, 2048, (AttentionLayer(16, 2, 128, 0.09), MlpLayer(8192)), 1e-5, max_position_embeddings=131_072
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def limits_of(device: torch.device, **options: object) -> tuple[int, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens`."""
    limits = EngineLimits.of(EngineConfig.of(**options), SPEC, device)
    return limits.max_num_seqs, limits.max_num_batched_tokens


def test_defaults_depend_on_the_device() -> None:
    assert limits_of(CUDA) == (256, 8192)
    assert limits_of(CPU) == (64, 512)
    assert limits_of(CUDA, max_num_seqs=7, max_model_len=90) == (7, 630), "more tokens cannot come together"
    assert limits_of(CUDA, draft="ngram", num_speculative_tokens=63) == (256, 256 * 64)
    assert limits_of(CPU, draft="ngram", num_speculative_tokens=9) == (64, 640)
    assert limits_of(CUDA, max_num_batched_tokens=300) == (256, 300)


class Elsewhere(HybridDecoder):
    """Describes a model on a GPU that is not here."""

    device = property(lambda self: CUDA, lambda self, device: None)  # type: ignore[assignment]


def fitted(
    monkeypatch: pytest.MonkeyPatch, limits: EngineLimits, gibibytes: int, **options: Any
) -> tuple[EngineLimits, int]:
    """Return the limits on a GPU of so much free memory, and the memory of steps with them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gibibytes << 30, gibibytes << 30))
    config = EngineConfig.of(gpu_memory_utilization=1.0, **options)
    graphs = GraphOptions.of(config.graphs, CUDA)
    model = Elsewhere(SPEC, dtype=torch.bfloat16, device="meta")
    none: Any = None
    sizes = _CacheSizes(none, config, model, none, none, ALONE, ALONE)
    found = sizes._fitted(limits, graphs)
    return found, workspace_bytes(model, found, 16, largest_capture(graphs, found))


@pytest.mark.parametrize("drafts", [0, 4])
def test_defaults_are_halved_until_steps_fit(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Into a quarter of a GPU, but not below 64 rows and 2,048 tokens."""
    limits = EngineLimits(131_072, 256, 8192, drafts)
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    for gibibytes in (80, 40, 24, 16, 12, 8, 4, 1):
        found, needed = fitted(monkeypatch, limits, gibibytes)
        assert found.max_num_seqs <= rows
        assert found.max_num_batched_tokens <= tokens
        rows, tokens = found.max_num_seqs, found.max_num_batched_tokens
        assert needed <= gibibytes << 28 or (rows, tokens) == (64, 2048)
        if gibibytes == 80:
            assert found == limits
    assert (rows, tokens) == (64, 2048)


def test_what_was_chosen_is_never_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(131_072, 256, 8192)
    rows, _ = fitted(monkeypatch, limits, 1, max_num_seqs=256)
    assert (rows.max_num_seqs, rows.max_num_batched_tokens) == (256, 2048)
    tokens, _ = fitted(monkeypatch, limits, 1, max_num_batched_tokens=8192)
    assert (tokens.max_num_seqs, tokens.max_num_batched_tokens) == (64, 8192)
    assert fitted(monkeypatch, limits, 1, max_num_seqs=256, max_num_batched_tokens=8192)[0] == limits
    wide = EngineLimits(131_072, 1024, 8192, 7)
    assert fitted(monkeypatch, wide, 1, max_num_seqs=1024)[0] == wide, "a step decodes all rows"


def test_caches_of_a_given_size_leave_the_rest_to_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(131_072, 256, 8192)
    given = 7 << 30
    assert fitted(monkeypatch, limits, 12)[0] != limits
    assert fitted(monkeypatch, limits, 12, kv_cache_memory_bytes=given)[0] == limits
    found, needed = fitted(monkeypatch, limits, 10, kv_cache_memory_bytes=given)
    assert found != limits
    assert needed <= (10 << 30) - given


@pytest.mark.parametrize("rows", [1, 3, 64, 200, 256, 300])
@pytest.mark.parametrize("drafts", [0, 1, 4, 7])
@pytest.mark.parametrize("mode", [CudaGraphMode.FULL_AND_PIECEWISE, CudaGraphMode.FULL_DECODE_ONLY])
def test_every_batch_that_decodes_has_a_graph_by_default(mode: CudaGraphMode, rows: int, drafts: int) -> None:
    limits = EngineLimits(131_072, rows, max(8192, rows * (1 + drafts)), drafts)
    lengths = sorted({1, 1 + drafts})
    plan, reason = make_dispatcher(GraphOptions(mode), limits.buffers, GraphSupport.ALWAYS, lengths)
    assert reason is None
    for length in lengths:
        coverage = plan.coverage(rows, length)
        assert not coverage.gaps
        assert coverage.mean_padding < 0.12 or rows < 64
    assert gaps_of_drafts(plan, rows, 1 + drafts) is None
    assert max(key.num_tokens for key in plan.keys) <= max(512, rows * (1 + drafts))


def test_default_sizes_end_where_steps_do() -> None:
    assert default_capture_sizes(3) == (1, 2)
    assert default_capture_sizes(8192)[-1] == 512
    assert default_capture_sizes(8192, 1000)[-2:] == (960, 1000)
    assert default_capture_sizes(700, 1000)[-1] == 700
