"""The parts of a model on several ranks: weights of the whole, cut, and logits of the whole, summed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EVEN
from torch import Tensor

from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.sharding import num_sums, sum_bytes
from together import OneOf, Together, at_once, gathered


def cut(whole: Tensor, ranges: Any) -> Tensor:
    for axis, own in ranges.items():
        whole = torch.cat([whole.narrow(axis, first, end - first) for first, end in own], axis)
    return whole


@pytest.fixture(params=EVEN)
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Any) -> Path:
    path: Path = tiny_checkpoint(request.param, **EVEN[request.param])[0]
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part_of_every_weight(folder: Path, size: int) -> None:
    checkpoint = open_checkpoint(folder)
    whole = load_model(checkpoint, torch.float32, "cpu").weights()
    for rank in range(size):
        part = load_model(checkpoint, torch.float32, "cpu", Ranks(rank, size, "none"))
        weights = part.weights()
        assert weights.keys() == whole.keys()
        for name, weight in weights.items():
            wanted = cut(whole[name], part.share.cuts.get(name, {}))
            wanted = torch.zeros_like(wanted) if name in part.share.once else wanted
            assert torch.equal(weight, wanted), name
        halves = sum(weight.numel() for weight in weights.values())
        assert halves < sum(weight.numel() for weight in whole.values()) * (0.75 if size == 2 else 0.6)


def logits(model: HybridDecoder, driver: Any, tokens: list[int]) -> Tensor:
    found: Tensor = driver.Driver(model).run(tokens, [11, 1, 1, 5])
    return found if model.shard is None else gathered(model.shard, found)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_what_one_does(
    folder: Path, driver: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    checkpoint = open_checkpoint(folder)
    tokens = torch.randint(0, checkpoint.spec.vocab_size, (18,), generator=torch.manual_seed(3)).tolist()
    wanted = logits(load_model(checkpoint, torch.float32, "cpu"), driver, tokens)
    together = Together(size)
    for name in ("sum_", "every"):
        through = partial(tell, together, name)
        monkeypatch.setattr(Ranks, name, lambda ranks, x, through=through: through(ranks, x))

    def run(rank: int) -> Tensor:
        model = load_model(checkpoint, torch.float32, "cpu", Ranks(rank, size, "none"))
        return logits(model, driver, tokens)

    for found in at_once(together, run):
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def tell(together: Together, name: str, ranks: Ranks, x: Tensor) -> Tensor:
    told: Tensor = getattr(OneOf(together, ranks.rank), name)(x) if not ranks.alone else x
    return told


def test_sums_over_ranks_are_as_many_as_are_said(folder: Path, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    monkeypatch.setattr(Ranks, "sum_", lambda ranks, x: summed.append(x.nbytes) or x)
    for size in (2, 4):
        model = load_model(open_checkpoint(folder), torch.float32, "cpu", Ranks(0, size, "none"))
        driver.Driver(model).run(list(range(5)), [5])
        assert len(summed) == num_sums(model.spec)
        assert sum(summed) == 5 * sum_bytes(model.spec, 4), "of five tokens"
        summed.clear()


def test_what_cannot_be_split_is_refused_with_what_can(tiny_checkpoint: Any) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama")[0])
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size is 4; it must divide num_attention_heads = 6: 1, 2, 3, 6$"
    ):
        HybridDecoder(checkpoint.spec, dtype=torch.float32, device="meta", ranks=Ranks(0, 4, "none"))
    spec = replace(checkpoint.spec, layers=checkpoint.spec.layers[:2])
    with pytest.raises(ValueError, match=r"^tensor_parallel_size is 3; it must divide num_key_value_heads = 2 or be"):
        HybridDecoder(spec, dtype=torch.float32, device="meta", ranks=Ranks(0, 3, "none"))
