"""One rank among several, and the collectives of a step.

Every rank runs the same step over its part of each layer. Collectives are operators over plain tensors, so that graphs
record them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from bateleur.eagle import VocabShard
from bateleur.runner.errors import CollectiveBroken
from bateleur.runner.utils.device import indexed

Range = tuple[int, int]
"""First, and one behind the last."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many ranks this is; `group` is the name of their process group, "" for one alone."""

    rank: int = 0
    size: int = 1
    group: str = ""
    local: Range = (0, 1)
    """Which of how many on its machine."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be at least 0 and less than size = {self.size}")

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1

    def device(self, device: torch.device) -> torch.device:
        """The device of this rank: `device` with its index, or, of several ranks on GPUs, GPU r of the machine for the
        rank that is number r there.
        """
        several = not self.alone and device.type == "cuda"
        return torch.device("cuda", self.local[0]) if several else indexed(device)

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

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of what every rank has, in place."""
        if not self.alone:
            torch.ops.bateleur.sum_of_ranks(x, self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """The largest of what every rank has, entry by entry, in place."""
        if not self.alone:
            torch.ops.bateleur.max_of_ranks(x, self.group)
        return x

    def every(self, x: Tensor) -> Tensor:
        """(size, *x.shape) what each rank has."""
        if self.alone:
            return x.unsqueeze(0)
        every: Tensor = torch.ops.bateleur.every_of_ranks(x, self.size, self.group)
        return every

    def swap(self, x: Tensor) -> Tensor:
        """(size, ...) what each rank has for this one, of (size, ...), what this one has for each."""
        if self.alone:
            return x
        swapped: Tensor = torch.ops.bateleur.swap_of_ranks(x, self.group)
        return swapped

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """By rank the numbers that it has, as many each, from memory to memory: no part of a step."""
        told: list[list[int]] = self.every(torch.tensor([min(each, _MOST) for each in numbers])).tolist()
        return told

    def least(self, number: int) -> int:
        """The least that any rank has."""
        return min(told for (told,) in self.tell_all([number]))

    def all_have(self, has: Sequence[bool]) -> list[bool]:
        """Of several things those that every rank has, as `tell_all`."""
        if not has:
            return []
        told: list[bool] = self.every(torch.tensor(has, dtype=torch.uint8)).amin(0).bool().tolist()
        return told

    def vocab_shard(self, vocab_size: int) -> VocabShard | None:
        """This rank's part of a vocabulary that is shared as evenly as can be, or None if it has all of it."""
        if self.alone:
            return None
        return VocabShard(tuple(rank * vocab_size // self.size for rank in range(self.size + 1)), self)


ALONE = Ranks()
"""One process that has all of a model."""


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)


def _group(name: str) -> Any:
    return c10d._resolve_process_group(cast(Any, name))


@contextmanager
def _named() -> Iterator[None]:
    """What backends raise is a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveBroken(f"an exchange between ranks broke off: {error}") from error


_MOST = torch.iinfo(torch.int64).max
_SUM, _LARGEST, _GATHER = c10d.AllreduceOptions(), c10d.AllreduceOptions(), c10d.AllgatherOptions()
_SWAP = c10d.AllToAllOptions()
_LARGEST.reduceOp = c10d.ReduceOp(c10d.ReduceOp.MAX)
_SUM.asyncOp = _LARGEST.asyncOp = _GATHER.asyncOp = _SWAP.asyncOp = (
    False  # on the stream of the step, where there are any
)


def _sum_of_ranks(x: Tensor, group: str) -> None:
    with _named():
        _group(group).allreduce([x], _SUM).wait()


def _max_of_ranks(x: Tensor, group: str) -> None:
    with _named():
        _group(group).allreduce([x], _LARGEST).wait()


def _every_of_ranks(x: Tensor, size: int, group: str) -> Tensor:
    every = x.new_empty(size, *x.shape)
    with _named():
        _group(group)._allgather_base(every.view(-1), x.contiguous().view(-1), _GATHER).wait()
    return every


def _swap_of_ranks(x: Tensor, group: str) -> Tensor:
    swapped = torch.empty_like(x, memory_format=torch.contiguous_format)
    with _named():
        _group(group).alltoall_base(swapped, x.contiguous(), [], [], _SWAP).wait()
    return swapped


_library = torch.library.Library("bateleur", "FRAGMENT")
for _name, _schema, _function in (
    ("sum_of_ranks", "(Tensor(a!) x, str group) -> ()", _sum_of_ranks),
    ("max_of_ranks", "(Tensor(a!) x, str group) -> ()", _max_of_ranks),
    ("every_of_ranks", "(Tensor x, int size, str group) -> Tensor", _every_of_ranks),
    ("swap_of_ranks", "(Tensor x, str group) -> Tensor", _swap_of_ranks),
):
    _library.define(_name + _schema)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
