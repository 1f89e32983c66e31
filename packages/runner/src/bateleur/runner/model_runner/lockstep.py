"""What data-parallel ranks agree on before each step: all take part in every layer of experts, or none."""

from __future__ import annotations

from collections.abc import Iterable

from bateleur.cudagraph import Agreement, Ask, BatchExecutionDescriptor, Bid, CapturePlan
from bateleur.cudagraph.consensus import BidCodec, fold
from bateleur.runner.models.exchange import Exchange


class Lockstep:
    """Whether any rank has work, on which graph all run, or else how many rows each brings to the experts: one exchange
    of a few integers.

    A `bateleur.cudagraph.Consensus`. The host waits for the other hosts, since what it stages depends on them.
    """

    def __init__(
        self, exchange: Exchange, plan: CapturePlan, ready: Iterable[BatchExecutionDescriptor]
    ) -> None:
        """ready: the graphs that all ranks have, see `keep_common`."""
        self._exchange, self._plan, self._codec = exchange, plan, BidCodec(plan)
        everywhere = frozenset(ready)
        self._ready = None if everywhere.issuperset(plan.keys) else everywhere

    def agree(self, mine: Bid) -> Agreement:
        """The fold of all bids, whose graphs are those of all."""
        told = self._exchange.ranks.tell_all(self._codec.encode(Bid(mine.ask)))
        bids = [Bid(self._codec.decode(each).ask, self._ready) for each in told]
        agreed = fold(bids, self._plan)
        self._exchange.num_rows = 0 if agreed.descriptor is not None else agreed.num_tokens
        return agreed

    def of(self, ask: Ask | None) -> Agreement:
        """That of a rank with this batch, or without any."""
        return self.agree(Bid(ask))
