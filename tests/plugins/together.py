"""Ranks in threads of one process, with `ShardCollectives` that count bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle import VocabShard

T = TypeVar("T")


@dataclass
class Together:
    """Exchanges values between ranks, and counts (collective, bytes) of one of them."""

    size: int
    told: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=60)
        self.slots: list[Tensor] = [torch.empty(0)] * self.size

    def lay_down(self, rank: int, kind: str, x: Tensor) -> Tensor:
        """Returns (size, *x.shape), the values of all ranks."""
        self.slots[rank] = x.clone()
        if not rank:
            self.told.append((kind, x.nbytes))
        self.barrier.wait()
        every = torch.stack(self.slots)
        self.barrier.wait()
        return every

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank has sent."""
        return sum(count for _, count in self.told)


@dataclass
class OneOf:
    """`ShardCollectives` of threads."""

    together: Together
    rank: int

    @property
    def size(self) -> int:
        return self.together.size

    def max_(self, x: Tensor) -> Tensor:
        return x.copy_(self.together.lay_down(self.rank, "max", x).amax(0))

    def sum_(self, x: Tensor) -> Tensor:
        return x.copy_(self.together.lay_down(self.rank, "sum", x).sum(0))

    def every(self, x: Tensor) -> Tensor:
        return self.together.lay_down(self.rank, "every", x)


def parts_of(vocab_size: int, together: Together) -> list[VocabShard]:
    """The vocabulary shard of each rank, as even as possible."""
    starts = tuple(rank * vocab_size // together.size for rank in range(together.size + 1))
    return [VocabShard(starts, OneOf(together, rank)) for rank in range(together.size)]


def gathered(shard: VocabShard, own_NL: Tensor) -> Tensor:
    """(N, V) logits of all ranks, for checks."""
    every = shard.collectives.every(pad(own_NL, (0, shard.widest - own_NL.shape[1])))
    widths = [end - first for first, end in zip(shard.starts, shard.starts[1:], strict=False)]
    return torch.cat([each[:, :width] for each, width in zip(every, widths, strict=True)], dim=1)


def at_once(together: Together, call: Callable[[int], T]) -> list[T]:
    """Run `call(rank)` on every rank in a thread, and return the results; raises the error of a rank."""

    def run(rank: int) -> T:
        try:
            return call(rank)
        except BaseException:
            together.barrier.abort()
            raise

    with ThreadPoolExecutor(together.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(together.size)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in errors:
        if type(error).__name__ != "BrokenBarrierError":
            raise error
    return [each.result() for each in futures]
