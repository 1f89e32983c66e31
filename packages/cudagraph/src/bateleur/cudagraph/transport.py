"""How bids reach every rank: not at all for one, by one collective a step for several."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from bateleur.cudagraph.consensus import NO_COMMON_VARIANT, Agreement, Bid, fold
from bateleur.cudagraph.decision import Ask
from bateleur.cudagraph.plan import CapturePlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WORD_BITS = 62  # of an int64, so that no mask of keys is negative


class BidCodec:
    """Bids about one plan as integer vectors of one length.

    Layout: num_reqs (0: nothing to do), num_tokens, query_len (0: unequal), max_query_len, decode_only, the
    variant's index in the plan (-1: not in it), and words of 62 bits, one bit for each key of the plan that is ready.

    Attributes:
        length: numbers in a vector.
        fingerprint: equal for equal plans, on every machine; below 2**56.
    """

    def __init__(self, plan: CapturePlan) -> None:
        """Number the variants and keys of `plan`."""
        self._plan = plan
        self._variants = plan.variants
        self._all_ready = (1 << len(plan.keys)) - 1
        self._num_words = -(-len(plan.keys) // _WORD_BITS)
        self.length = 6 + self._num_words
        text = repr((plan.mode, plan.variants, plan.keys)).encode()
        self.fingerprint = int.from_bytes(blake2b(text, digest_size=7).digest(), "big")

    def encode(self, bid: Bid) -> list[int]:
        """Return `bid` as `length` integers, none below -1."""
        ask, mask = bid.ask, self._all_ready
        if bid.ready is not None:
            mask = sum(1 << bit for bit, key in enumerate(self._plan.keys) if key in bid.ready)
        words = [
            mask >> shift & (1 << _WORD_BITS) - 1 for shift in range(0, len(self._plan.keys), _WORD_BITS)
        ]
        if ask is None:
            return [0] * 6 + words
        variant = self._variants.index(ask.variant) if ask.variant in self._variants else -1
        sizes = [ask.num_reqs, ask.num_tokens, ask.query_len or 0, ask.max_query_len]
        return [*sizes, int(ask.decode_only), variant, *words]

    def decode(self, vector: Sequence[int]) -> Bid:
        """Return what was encoded; a variant that the plan does not have becomes `NO_COMMON_VARIANT`."""
        num_reqs, num_tokens, query_len, max_query_len, decode_only, variant, *words = vector
        mask = sum(word << index * _WORD_BITS for index, word in enumerate(words))
        ready = None
        if mask != self._all_ready:
            ready = frozenset(key for bit, key in enumerate(self._plan.keys) if mask >> bit & 1)
        if num_reqs == 0:
            return Bid(None, ready)
        name = NO_COMMON_VARIANT if variant < 0 else self._variants[variant]
        ask = Ask(num_reqs, num_tokens, query_len or None, max_query_len, bool(decode_only), name)
        return Bid(ask, ready)


class LocalConsensus:
    """The consensus of a single rank: what it wants is agreed."""

    def __init__(self, plan: CapturePlan) -> None:
        """Decide by `plan`."""
        self._plan = plan

    def agree(self, mine: Bid) -> Agreement:
        """Return the fold of the one bid."""
        return fold((mine,), self._plan)


class TorchDistConsensus:
    """Consensus over the ranks of a `torch.distributed` group: one all-gather of a few integers a step.

    The host waits for the result, since what it stages depends on it. With a CPU group (gloo) it waits for the
    other hosts only; with tensors on a GPU also for the work queued on the current stream before.
    """

    def __init__(
        self, group: ProcessGroup | None, plan: CapturePlan, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate the buffers on `device` and compare the plans of all ranks: all must construct it together.

        group: None is the default group. Raises `ValueError`, on every rank, if the plans differ.
        """
        import torch.distributed as dist

        self._group = group
        self._plan = plan
        self._codec = BidCodec(plan)
        world = dist.get_world_size(group)
        marks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
        dist.all_gather(marks, torch.full_like(marks[0], self._codec.fingerprint), group=group)
        others = [rank for rank, mark in enumerate(marks) if int(mark) != int(marks[0])]
        if others:
            raise ValueError(
                f"plan must be the same on all ranks; that of rank {others[0]} is not that of rank 0"
            )
        self._staging = torch.zeros(self._codec.length, dtype=torch.int64)
        self._staging_values = self._staging.numpy()
        self._mine = self._staging.to(device)  # the same tensor on CPU
        self._all = torch.zeros(world, self._codec.length, dtype=torch.int64, device=device)
        self._rows = list(self._all)

    def agree(self, mine: Bid) -> Agreement:
        """Return the fold of every rank's bid; every rank of the group must call it once for each step."""
        import torch.distributed as dist

        self._staging_values[:] = self._codec.encode(mine)
        if self._mine is not self._staging:
            self._mine.copy_(self._staging)
        dist.all_gather(self._rows, self._mine, group=self._group)
        return fold([self._codec.decode(row) for row in self._all.tolist()], self._plan)
