"""What ranks exchange, between two processes over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bateleur.eagle import argmax
from bateleur.runner.distributed.ranks import Ranks
from in_fork import raised_in_fork
from together import gathered


def exchange(store: Path, rank: int) -> None:
    """What rank `rank` of two finds; raises where it is not what it should be."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    ranks = Ranks(rank, 2, dist.group.WORLD.group_name)
    x = torch.full((4, 2), 1.0 + rank)
    assert ranks.sum_(x) is x
    assert torch.equal(x, torch.full((4, 2), 3.0))
    assert ranks.max_(torch.tensor([rank, 1 << 40, -rank])).tolist() == [1, 1 << 40, 0]
    assert ranks.every(torch.full((2, 1), rank)).tolist() == [[[0], [0]], [[1], [1]]]
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = logits[1, 5] = 9.0
    part = ranks.vocab_shard(11)
    assert part is not None
    own = logits[:, part.first : part.end]
    assert own.shape[1] == 5 + rank
    assert torch.equal(gathered(part, own), logits)
    assert argmax(own, part).token_ids.tolist() == argmax(logits).token_ids.tolist()
    dist.destroy_process_group()


def test_two_processes_exchange(tmp_path: Path) -> None:
    """Uneven parts, too."""
    store = tmp_path / "store"
    other = os.fork()
    if not other:
        try:
            exchange(store, 1)
        finally:
            os._exit(0)
    _, told = raised_in_fork(lambda: exchange(store, 0))
    os.waitpid(other, 0)
    assert told == "nothing was raised"


def test_one_alone_exchanges_nothing() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert Ranks().sum_(x) is x
    assert Ranks().max_(x) is x
    assert torch.equal(Ranks().every(x)[0], x)
    assert Ranks().vocab_shard(7) is None
    assert Ranks().even("heads", 7) == Ranks().shared("heads", 7) == Ranks().about(7) == (0, 7)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_what_is_shared_about_evenly_is_all_there(size: int) -> None:
    parts = [Ranks(rank, size, "none").about(10) for rank in range(size)]
    assert [each for first, end in parts for each in range(first, end)] == list(range(10))
    part = Ranks(size - 1, size, "none").vocab_shard(10)
    assert part is None or (part.first, part.end) == parts[-1]


def test_a_rank_is_one_of_them() -> None:
    with pytest.raises(ValueError, match=r"^rank is 2; it must be at least 0 and less than size = 2$"):
        Ranks(2, 2, "none")
