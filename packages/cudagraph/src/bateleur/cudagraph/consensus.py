"""What all ranks run together, decided by each rank alone from what every rank wants.

Data-parallel ranks whose layers talk to each other must run the same graph of the same size, or all run eagerly.
Every rank folds the same bids, in any order, to the same agreement.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
import torch.distributed as dist

from bateleur.cudagraph.decision import NEARNESS, Ask, Decision, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant
from bateleur.cudagraph.plan import CapturePlan

NO_COMMON_VARIANT: Variant = ("no common variant",)
"""Variant of a joint batch whose ranks want different ones; no graph has it."""

_WORD_BITS = 62  # of an int64, so that no mask of keys is negative


@dataclass(frozen=True, slots=True)
class Bid:
    """What one rank brings to a step.

    ask: its batch; None where it has nothing to do.
    ready: the keys it could replay now; None means all of the plan. A rank with nothing to do replays too.
    """

    ask: Ask | None
    ready: Container[BatchExecutionDescriptor] | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """What every rank of a step runs: each value is the same on all ranks.

    ask: the joint batch, in each size the largest of any rank; None where no rank has anything to run, so that
        nobody runs. A rank without requests runs a dummy batch of this shape.
    descriptor: the graph's key on every rank, None for eager everywhere.
    why: the kind of graph, or the constraint that kept the ranks from one.
    rank: the rank that kept all others from a graph, because its own batch has none or because it has not captured
        the common one; `why` is then its reason. None where that takes several ranks, or all run on a graph.
    """

    ask: Ask | None
    descriptor: BatchExecutionDescriptor | None
    why: Why
    rank: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that no rank exceeds: with a graph, what each rank runs; 0 where nobody runs."""
        if self.descriptor is not None:
            return self.descriptor.num_tokens
        return 0 if self.ask is None else self.ask.num_tokens

    def decision(self, ask: Ask | None) -> Decision:
        """Return this agreement for one rank's own batch, with the padding it needs; None for a rank without one.

        Raises `ValueError` for a batch that is larger than the joint one: it was not proposed.
        """
        num_reqs, num_tokens = (0, 0) if ask is None else (ask.num_reqs, ask.num_tokens)
        most_reqs, most_tokens = (0, 0) if self.ask is None else (self.ask.num_reqs, self.ask.num_tokens)
        if num_reqs > most_reqs or num_tokens > most_tokens:
            raise ValueError(
                f"ask of {num_reqs} requests and {num_tokens} tokens exceeds the agreed {most_reqs} and "
                f"{most_tokens}: it was not part of the bids"
            )
        key = self.descriptor
        if key is None:
            return Decision(None, self.why)
        pad_reqs = 0 if key.num_reqs is None else key.num_reqs - num_reqs
        return Decision(key, self.why, key.num_tokens - num_tokens, pad_reqs)

    def __str__(self) -> str:
        if self.descriptor is not None:
            return f"all ranks: {self.descriptor}"
        return f"{'all ranks' if self.rank is None else f'rank {self.rank}'}: {self.why}"


class Consensus(Protocol):
    """How a rank learns what all ranks run."""

    def agree(self, mine: Bid) -> Agreement:
        """Return the fold of every rank's bid. Every rank must call it once for each step."""


def fold(bids: Sequence[Bid], plan: CapturePlan) -> Agreement:
    """Return what all ranks run, given what each of them wants, by rank.

    One graph is chosen for all: it holds the largest batch, has an exact query length only if all rows of all
    ranks have it, is captured on every rank, and is a decode graph only if every rank's batch may use one. Where
    there is none, all ranks run eagerly. The order of the ranks changes no more than the number in `rank`.

    Raises `ValueError` for no bids.
    """
    if not bids:
        raise ValueError("bids must hold one of each rank, got none")
    asks = [bid.ask for bid in bids if bid.ask is not None]
    if not asks:
        return Agreement(None, None, Why.IDLE)
    joint = _join(asks)
    decision = plan.decide(joint, _ready_everywhere(bids, plan))
    if decision.descriptor is not None:
        return Agreement(joint, decision.descriptor, decision.why)
    rank, why = _who_refused(bids, joint, decision.why, plan)
    return Agreement(joint, None, why, rank)


def _join(asks: Sequence[Ask]) -> Ask:
    """Return the smallest ask that a graph admits only if it admits each of `asks`."""
    query_lens, variants = {ask.query_len for ask in asks}, {ask.variant for ask in asks}
    return Ask(
        num_reqs=max(ask.num_reqs for ask in asks),
        num_tokens=max(ask.num_tokens for ask in asks),
        query_len=query_lens.pop() if len(query_lens) == 1 else None,
        max_query_len=max(ask.max_query_len for ask in asks),
        decode_only=all(ask.decode_only for ask in asks),
        variant=variants.pop() if len(variants) == 1 else NO_COMMON_VARIANT,
    )


def _ready_everywhere(bids: Sequence[Bid], plan: CapturePlan) -> Container[BatchExecutionDescriptor] | None:
    limits = [bid.ready for bid in bids if bid.ready is not None]
    if not limits:
        return None
    return frozenset(key for key in plan.keys if all(key in ready for ready in limits))


def _who_refused(bids: Sequence[Bid], joint: Ask, why: Why, plan: CapturePlan) -> tuple[int | None, Why]:
    """Return the rank furthest from a graph and its reason; no rank and `why` where only all together have none."""
    refusals: list[tuple[int, int | None, Why]] = []
    for rank, bid in enumerate(bids):
        ask, ready = (joint, bid.ready) if why is Why.NOT_READY else (bid.ask, None)
        if ask is not None and (own := plan.decide(ask, ready)).descriptor is None:
            refusals.append((NEARNESS[own.why], rank, own.why))
    _, who, reason = min(refusals, default=(0, None, why))
    return who, reason


class BidCodec:
    """Bids about one plan as integer vectors of one length.

    Layout: num_reqs (0: nothing to do), num_tokens, query_len (0: unequal), max_query_len, decode_only, the
    variant's index in the plan (-1: not in it), and words of 62 bits, one bit for each key of the plan that is ready.

    Attributes:
        length: numbers in a vector.
        fingerprint: equal for equal plans, on every machine; below 2**56.
    """

    def __init__(self, plan: CapturePlan) -> None:
        self._plan = plan
        self._variants = plan.variants
        self._all_ready = (1 << len(plan.keys)) - 1
        self.length = 6 + -(-len(plan.keys) // _WORD_BITS)
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
        self, group: dist.ProcessGroup | None, plan: CapturePlan, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate the buffers on `device` and compare the plans of all ranks: all must construct it together.

        group: None is the default group. Raises `ValueError`, on every rank, if the plans differ.
        """
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
        self._staging_values[:] = self._codec.encode(mine)
        if self._mine is not self._staging:
            self._mine.copy_(self._staging)
        dist.all_gather(self._rows, self._mine, group=self._group)
        return fold([self._codec.decode(row) for row in self._all.tolist()], self._plan)
