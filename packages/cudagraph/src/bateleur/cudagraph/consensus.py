"""What all ranks run together, decided by each rank alone from what every rank wants. Pure.

Data-parallel ranks whose layers talk to each other must run the same graph of the same size, or all run eagerly.
Every rank folds the same bids, in any order, to the same agreement.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from bateleur.cudagraph.decision import NEARNESS, Ask, Decision, Why
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor, Variant
from bateleur.cudagraph.plan import CapturePlan

NO_COMMON_VARIANT: Variant = ("no common variant",)
"""Variant of a joint batch whose ranks want different ones; no graph has it."""


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

    def for_query_len(
        self,
        plan: CapturePlan,
        query_len: int,
        ready: Container[BatchExecutionDescriptor] | None = None,
    ) -> Agreement:
        """Return what all ranks run when each of the joint batch's rows computes `query_len` tokens.

        This is a drafter's decision after the target's: it needs nothing but what is agreed already.
        plan: the drafter's. ready: its keys that every rank can replay; must be the same on all ranks.
        """
        if self.ask is None:
            return self
        rows = self.ask.num_reqs
        ask = Ask(rows, rows * query_len, query_len, query_len, True, self.ask.variant)
        decision = plan.decide(ask, ready)
        return Agreement(ask, decision.descriptor, decision.why)

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
