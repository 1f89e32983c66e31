"""What data-parallel ranks agree on before each step: all take part in every layer of experts, or none."""

from __future__ import annotations

from collections.abc import Iterable

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    JointDispatch,
    RankStep,
    UnpaddedBatch,
)
from bateleur.cudagraph.data_parallel import RankStepCodec, dispatch_jointly
from bateleur.runner.distributed.expert_parallel import ExpertParallel


class DataParallelSync:
    """Whether any rank has work, on which graph all run, or else how many rows each brings to the experts: one exchange
    of a few integers.

    A `bateleur.cudagraph.DispatchCoordinator`. The host waits for the other hosts, because the padding that it stages
    depends on their batches.
    """

    def __init__(
        self, exchange: ExpertParallel, plan: CudagraphDispatcher, ready: Iterable[BatchExecutionDescriptor]
    ) -> None:
        """ready: the graphs that all ranks have, see `keep_common`."""
        self._exchange, self._plan, self._codec = exchange, plan, RankStepCodec(plan)
        everywhere = frozenset(ready)
        self._ready = None if everywhere.issuperset(plan.keys) else everywhere

    def coordinate(self, mine: RankStep) -> JointDispatch:
        """The fold of all bids, whose graphs are those of all."""
        told = self._exchange.ranks.tell_all(self._codec.encode(RankStep(mine.batch)))
        bids = [RankStep(self._codec.decode(each).batch, self._ready) for each in told]
        agreed = dispatch_jointly(bids, self._plan)
        self._exchange.num_rows = 0 if agreed.descriptor is not None else agreed.num_tokens
        return agreed

    def of(self, ask: UnpaddedBatch | None) -> JointDispatch:
        """That of a rank with this batch, or without any."""
        return self.coordinate(RankStep(ask))
