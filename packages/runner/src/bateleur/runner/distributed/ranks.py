"""One rank among several, and the collectives of a step.

Every rank runs the same step over its part of each layer. Collectives are operators over plain tensors, so that CUDA
graphs can capture them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from bateleur.eagle import VocabShard
from bateleur.runner.errors import CollectiveBroken
from bateleur.runner.utils.device import indexed

Range = tuple[int, int]  # first, and one after the last


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, and collectives with the other ranks.

    group: name of the process group, "" if alone. local: pair of this process's local rank (its rank among those of
    this machine) and the number of ranks on this machine.
    """

    rank: int = 0
    size: int = 1
    group: str = ""
    local: Range = (0, 1)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be at least 0 and less than size = {self.size}")

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.size == 1

    def device(self, device: torch.device) -> torch.device:
        """Return the device of this rank, with an index if it is a GPU.

        With several ranks on GPUs, the index is the local rank. A single rank keeps the index of `device`, or without
        one gets the index of the current GPU.
        """
        several = not self.alone and device.type == "cuda"
        return torch.device("cuda", self.local[0]) if several else indexed(device)

    def even(self, name: str, count: int) -> Range:
        """Return which of `count` items this rank has, as (first, end). All ranks have equally many.

        Raises ValueError if `count` is not a multiple of the number of ranks. name: name of `count` in this error.
        """
        if count % self.size:
            divisors = ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)
            raise ValueError(f"tensor_parallel_size is {self.size}; it must divide {name} = {count}: {divisors}")
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share

    def shared(self, name: str, count: int) -> Range:
        """Return which of `count` items this rank has, as (first, end). All ranks have equally many.

        If there are fewer items than ranks, a rank has one item, which several ranks have. Raises ValueError unless
        `count` is a multiple or a divisor of the number of ranks. name: name of `count` in this error.
        """
        if count >= self.size:
            return self.even(name, count)
        if self.size % count:
            rule = f"it must divide {name} = {count} or be a multiple of it"
            raise ValueError(f"tensor_parallel_size is {self.size}; {rule}")
        own = self.rank * count // self.size
        return own, own + 1

    def about(self, count: int) -> Range:
        """Return which of `count` items this rank has, as (first, end). Numbers of items differ by at most one."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def sum_(self, x: Tensor) -> Tensor:
        """All-reduce (sum) x in place."""
        if not self.alone:
            torch.ops.bateleur.sum_of_ranks(x, self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """All-reduce (maximum) x in place."""
        if not self.alone:
            torch.ops.bateleur.max_of_ranks(x, self.group)
        return x

    def every(self, x: Tensor) -> Tensor:
        """All-gather x; returns (size, *x.shape)."""
        if self.alone:
            return x.unsqueeze(0)
        every: Tensor = torch.ops.bateleur.every_of_ranks(x, self.size, self.group)
        return every

    def swap(self, x: Tensor) -> Tensor:
        """All-to-all of x (size, ...): entry r goes to rank r, and entry r of the result comes from rank r."""
        if self.alone:
            return x
        swapped: Tensor = torch.ops.bateleur.swap_of_ranks(x, self.group)
        return swapped

    def gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """All-gather equally many integers from each rank, on the host; returns them by rank."""
        by_rank: list[list[int]] = self.every(torch.tensor([min(each, _MOST) for each in numbers])).tolist()
        return by_rank

    def least(self, number: int) -> int:
        """Return the minimum of a number over all ranks, on the host."""
        return min(found for (found,) in self.gather_ints([number]))

    def all_have(self, has: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on all ranks, on the host."""
        if not has:
            return []
        found: list[bool] = self.every(torch.tensor(has, dtype=torch.uint8)).amin(0).bool().tolist()
        return found

    def vocab_shard(self, vocab_size: int) -> VocabShard | None:
        """Return the vocabulary shard of this rank; None for one rank, which has the whole vocabulary."""
        if self.alone:
            return None
        return VocabShard(tuple(rank * vocab_size // self.size for rank in range(self.size + 1)), self)


ALONE = Ranks()  # one process with the whole model


def _group(name: str) -> Any:
    return c10d._resolve_process_group(cast(Any, name))


def _run(group: str, collective: str, *arguments: Any) -> None:
    """Run a collective and wait for it. Raises CollectiveBroken if it fails."""
    try:
        getattr(_group(group), collective)(*arguments).wait()
    except RuntimeError as error:
        raise CollectiveBroken(f"a collective between ranks failed: {error}") from error


_MOST = torch.iinfo(torch.int64).max
_SUM, _LARGEST = c10d.AllreduceOptions(), c10d.AllreduceOptions()
_GATHER, _SWAP = c10d.AllgatherOptions(), c10d.AllToAllOptions()
_LARGEST.reduceOp = c10d.ReduceOp(c10d.ReduceOp.MAX)
for _options in (_SUM, _LARGEST, _GATHER, _SWAP):
    _options.asyncOp = False  # on the stream of the step, if there is one


def _sum_of_ranks(x: Tensor, group: str) -> None:
    _run(group, "allreduce", [x], _SUM)


def _max_of_ranks(x: Tensor, group: str) -> None:
    _run(group, "allreduce", [x], _LARGEST)


def _every_of_ranks(x: Tensor, size: int, group: str) -> Tensor:
    every = x.new_empty(size, *x.shape)
    _run(group, "_allgather_base", every.view(-1), x.contiguous().view(-1), _GATHER)
    return every


def _swap_of_ranks(x: Tensor, group: str) -> Tensor:
    swapped = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run(group, "alltoall_base", swapped, x.contiguous(), [], [], _SWAP)
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
