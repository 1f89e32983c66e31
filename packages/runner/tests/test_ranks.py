"""What ranks exchange, between two processes over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bateleur.runner.parallel.ranks import Ranks
from in_fork import raised_in_fork


def exchange(store: Path, rank: int) -> None:
    """What rank `rank` of two finds; raises where it is not what it should be."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    ranks = Ranks(rank, 2, dist.group.WORLD.group_name)
    x = torch.full((4, 2), 1.0 + rank)
    assert ranks.sum_(x) is x
    assert torch.equal(x, torch.full((4, 2), 3.0))
    assert ranks.sizes(5) == [2, 3]
    own = torch.full((4, ranks.sizes(5)[rank]), float(rank))
    assert ranks.gather(own, ranks.sizes(5)).tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0]] * 4
    dist.destroy_process_group()


def test_two_processes_sum_and_gather(tmp_path: Path) -> None:
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
    assert Ranks().gather(x, [3]) is x
    assert Ranks().even("heads", 7) == Ranks().shared("heads", 7) == Ranks().about(7) == (0, 7)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_what_is_shared_about_evenly_is_all_there(size: int) -> None:
    parts = [Ranks(rank, size, "none").about(10) for rank in range(size)]
    assert [each for first, end in parts for each in range(first, end)] == list(range(10))
    assert [end - first for first, end in parts] == Ranks(0, size, "none").sizes(10)


def test_a_rank_is_one_of_them() -> None:
    with pytest.raises(ValueError, match=r"^rank is 2; it must be at least 0 and less than size = 2$"):
        Ranks(2, 2, "none")
