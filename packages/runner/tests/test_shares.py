"""What each of several ranks has of a model: the weights of the whole, cut, and the logits of the whole, summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.models import HybridDecoder
from bateleur.runner.parallel.ranks import Ranks

EVEN: dict[str, dict[str, Any]] = {
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8, "num_attention_heads": 8},
    "bamba": {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 12},
    "granitemoehybrid": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "llama": {"num_attention_heads": 8, "head_dim": 8},
    "falcon_h1": {"num_attention_heads": 8, "mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_d_ssm": 96},
    "kimi_linear": {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 4},
    "olmo_hybrid": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "lfm2": {"num_attention_heads": 4},
    "lfm2_moe": {"num_attention_heads": 4},
    "qwen3_5_text": {"num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 8},
    "qwen3_5_moe_text": {"num_attention_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_next": {"num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "nemotron_h-experts": {"n_groups": 2, "mamba_num_heads": 8, "num_attention_heads": 8},
    "granitemoehybrid-experts": {"num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Sizes of tiny models that four ranks can share."""


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


class Together:
    """Ranks in threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, Barrier(size, timeout=60)
        self.slots: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.clone()
        self.barrier.wait()
        every = [each for each in self.slots if each is not None]
        self.barrier.wait()
        return every


def sum_of(together: Together) -> Callable[[Ranks, Tensor], Tensor]:
    def sum_(ranks: Ranks, x: Tensor) -> Tensor:
        return x if ranks.alone else x.copy_(torch.stack(together.exchange(ranks.rank, x)).sum(0))

    return sum_


def columns_of(together: Together) -> Callable[[Ranks, Tensor, list[int]], Tensor]:
    def gather(ranks: Ranks, x: Tensor, sizes: list[int]) -> Tensor:
        every = [x] if ranks.alone else together.exchange(ranks.rank, x)
        assert [each.shape[1] for each in every] == sizes
        return torch.cat(every, 1)

    return gather


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    here = Together(0)
    monkeypatch.setattr(
        Ranks, "sum_", lambda ranks, x: x if ranks.alone else x.copy_(sum(here.exchange(ranks.rank, x)))
    )
    monkeypatch.setattr(
        Ranks, "gather", lambda ranks, x, _: x if ranks.alone else torch.cat(here.exchange(ranks.rank, x), 1)
    )
    return here


def logits(model: HybridDecoder, driver: Any, tokens: list[int]) -> Tensor:
    found: Tensor = driver.Driver(model).run(tokens, [11, 1, 1, 5])
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_what_one_does(
    folder: Path, driver: Any, together: Together, size: int
) -> None:
    checkpoint = open_checkpoint(folder)
    tokens = torch.randint(0, checkpoint.spec.vocab_size, (18,), generator=torch.manual_seed(3)).tolist()
    wanted = logits(load_model(checkpoint, torch.float32, "cpu"), driver, tokens)
    together.__init__(size)  # type: ignore[misc]
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = logits(
                load_model(checkpoint, torch.float32, "cpu", Ranks(rank, size, "none")), driver, tokens
            )
        except BaseException as error:
            found[rank] = error
            together.barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(size):
        if isinstance(found[rank], BaseException):
            raise found[rank]
        assert (found[rank] - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_what_cannot_be_split_is_refused_with_what_can(tiny_checkpoint: Any) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama")[0])
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size is 4; it must divide num_attention_heads = 6: 1, 2, 3, 6$"
    ):
        HybridDecoder(checkpoint.spec, dtype=torch.float32, device="meta", ranks=Ranks(0, 4, "none"))
    spec = replace(checkpoint.spec, layers=checkpoint.spec.layers[:2])
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size is 3; it must divide num_key_value_heads = 2 or be"
    ):
        HybridDecoder(spec, dtype=torch.float32, device="meta", ranks=Ranks(0, 3, "none"))
