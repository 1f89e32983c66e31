"""One rank among several, and the collectives of a step.

Every rank runs the same step over its part of each layer. Collectives are operators over plain tensors, so that graphs
record them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]
"""First, and one behind the last."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many ranks this is; `group` is the name of their process group, "" for one alone."""

    rank: int = 0
    size: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be at least 0 and less than size = {self.size}")

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1

    def even(self, name: str, count: int) -> Range:
        """This rank's of `count` things that are shared evenly. Raises ValueError if they cannot be."""
        if count % self.size:
            raise ValueError(
                f"tensor_parallel_size is {self.size}; it must divide {name} = {count}: {_divisors(count)}"
            )
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share

    def shared(self, name: str, count: int) -> Range:
        """The same, but of fewer things than ranks each rank has one, which it has in common with others."""
        if count >= self.size:
            return self.even(name, count)
        if self.size % count:
            raise ValueError(
                f"tensor_parallel_size is {self.size}; it must divide {name} = {count} or be a multiple of it"
            )
        own = self.rank * count // self.size
        return own, own + 1

    def about(self, count: int) -> Range:
        """This rank's of `count` things that are shared as evenly as can be."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def sizes(self, count: int) -> list[int]:
        """How many of `count` things each rank has, see `about`."""
        return [(rank + 1) * count // self.size - rank * count // self.size for rank in range(self.size)]

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of what every rank has, in place."""
        if not self.alone:
            torch.ops.bateleur.sum_of_ranks(x, self.group)
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """(T, sum(sizes)) of what every rank has, (T, sizes[rank]), side by side."""
        if self.alone:
            return x
        every: Tensor = torch.ops.bateleur.columns_of_ranks(x, list(sizes), self.group)
        return every


ALONE = Ranks()
"""One process that has all of a model."""


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)


def _group(name: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, name))


def _sum_of_ranks(x: Tensor, group: str) -> None:
    dist.all_reduce(x, group=_group(group))


def _columns_of_ranks(x: Tensor, sizes: list[int], group: str) -> Tensor:
    widest = max(sizes)
    mine = x.new_zeros(x.shape[0], widest)
    mine[:, : x.shape[1]] = x
    every = x.new_empty(len(sizes) * x.shape[0], widest)
    dist.all_gather_into_tensor(every, mine, group=_group(group))
    parts = every.view(len(sizes), x.shape[0], widest)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)


_library = torch.library.Library("bateleur", "FRAGMENT")
_library.define("sum_of_ranks(Tensor(a!) x, str group) -> ()")
_library.impl("sum_of_ranks", _sum_of_ranks, "CompositeExplicitAutograd")
_library.define("columns_of_ranks(Tensor x, int[] sizes, str group) -> Tensor")
_library.impl("columns_of_ranks", _columns_of_ranks, "CompositeExplicitAutograd")
