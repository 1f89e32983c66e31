"""Grouped products of few and of many rows are different kernels: both are loaded before the first request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bateleur.runner import LLM
from bateleur.runner.models import grouped


def test_every_tile_of_a_layer_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("bateleur.runner.models.kernels.grouped", reason="triton is not installed")
    seen: list[tuple[int, int]] = []

    def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> None:
        assert x.shape[1] == weight.shape[2]
        assert ends.shape == weight.shape[:1]
        seen.append((kernels.tile_options(len(x), len(weight), x.dtype)["BLOCK_S"], len(x)))

    monkeypatch.setattr(grouped, "_grouped_product", product)
    weight = torch.empty(8, 24, 16, dtype=torch.float16, device="meta")
    grouped.GroupedProjection(weight).warm_up(2048)
    assert sorted(seen) == [(16, 1), (64, 2048)]


def test_an_engine_warms_up_for_its_longest_step(tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(grouped.GroupedProjection, "warm_up", lambda self, most: seen.append(most))
    options: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 19}
    folder, model = tiny_checkpoint("nemotron_h-experts")
    LLM(folder, device="cpu", skip_tokenizer_init=True, **options)
    rows = 19 * model.config.num_experts_per_tok
    assert seen == [rows] * 2 * model.config.layers_block_type.count("moe"), "two projections of each layer"
