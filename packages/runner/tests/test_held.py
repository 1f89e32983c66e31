"""Memory that `bateleur info` reports, compared with the tensors of a model, also of one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EVEN
from torch import Tensor

from bateleur.runner.assets import shipped_model
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models.memory_report import packed_weight_bytes


def spans(thing: object) -> Iterator[tuple[int, int]]:
    """Return where the tensors of an object begin and end, recursively, without tables of positions."""
    if isinstance(thing, Tensor) and thing.numel() > 1:  # a norm has its eps as well
        yield thing.data_ptr(), thing.data_ptr() + thing.nbytes
    elif isinstance(thing, dict | list | tuple):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from spans(each)
    elif type(thing).__module__.startswith("bateleur"):
        for name in {*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())} - {"_tables"}:
            yield from spans(getattr(thing, name, None))


def in_memory(thing: object) -> int:
    """Return their bytes, each counted once."""
    total = behind = 0
    for start, end in sorted(spans(thing)):
        total += max(0, end - max(start, behind))
        behind = max(behind, end)
    return total


@pytest.mark.parametrize(
    ("family", "size"), [(None, 1), (None, 2), ("nemotron_h-experts", 2), ("qwen3_5_text", 1), ("granitemoehybrid", 2)]
)
def test_memory_of_weights_is_that_of_their_tensors(
    tiny_checkpoint: Callable[..., tuple[Path, Any]], family: str | None, size: int
) -> None:
    """The shipped model's matrices are stored in bfloat16 and stay so; those of the others are float32."""
    folder = shipped_model() if family is None else tiny_checkpoint(family, **EVEN[family])[0]
    checkpoint, device = open_checkpoint(folder), torch.device("cpu")
    facts = describe_checkpoint(folder, device="cpu", dtype="float32", tensor_parallel_size=size)
    for rank in range(size):
        ranks = Ranks(rank, size, "none" if size > 1 else "")
        model = load_model(checkpoint, torch.float32, device, ranks)
        weights = sum(weight.nbytes for weight in model.weights().values())
        predicted = packed_weight_bytes(model, device, checkpoint.dtype)
        model.pack()
        measured = in_memory(model)
        assert measured == predicted
        if rank == 0:
            assert (facts["weight_bytes"], facts["held_bytes"]) == (weights, measured)


def test_info_tells_what_one_of_several_ranks_has() -> None:
    whole, half = (describe_checkpoint(shipped_model(), device="cpu", tensor_parallel_size=size) for size in (1, 2))
    assert (whole["ranks"], whole["sums"], whole["sum_bytes_per_token"]) == (1, 0, 0)
    assert half["ranks"] == 2
    assert half["kv_bytes_per_token"] == whole["kv_bytes_per_token"] // 2
    assert half["mamba_state_bytes"] == whole["mamba_state_bytes"] // 2
    assert whole["parameters"] / 2 < half["parameters"] < whole["parameters"]
    assert "numbers of the first of 2 ranks" in checkpoint_table(half)
    assert f"all-reduces per step{half['sums']:>23}, of {half['sum_bytes_per_token']:,} bytes" in checkpoint_table(half)
    assert "all-reduces" not in checkpoint_table(whole)


def test_info_tells_what_one_of_data_parallel_ranks_has(tiny_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    """Some of the experts, and everything else."""
    folder, _ = tiny_checkpoint("nemotron_h-experts", **EVEN["nemotron_h-experts"])
    whole, half = (describe_checkpoint(folder, device="cpu", data_parallel_size=size) for size in (1, 2))
    assert (half["ranks"], half["sums"]) == (2, 0)
    assert half["held_bytes"] < whole["held_bytes"]
    kinds = {kind for kind in whole["parts"] if half["parts"][kind]["parameters"] < whole["parts"][kind]["parameters"]}
    assert kinds == {"experts"}
