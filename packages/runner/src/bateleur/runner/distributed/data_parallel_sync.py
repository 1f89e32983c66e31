"""Agreement of data-parallel ranks before each step: all ranks take part in every layer of experts, or none."""

from __future__ import annotations

from collections.abc import Iterable

from bateleur.cudagraph import BatchExecutionDescriptor, CudagraphDispatcher, JointDispatch, RankStep, UnpaddedBatch
from bateleur.cudagraph.data_parallel import RankStepCodec, dispatch_jointly
from bateleur.runner.distributed.expert_parallel import ExpertParallel


class DataParallelSync:
    """Chooses one CUDA graph for all ranks, or the number of tokens that each rank sends to the experts.

    It implements `bateleur.cudagraph.DispatchCoordinator` by one collective per step. The host waits for the other
    hosts, because its padding depends on their batches.
    """

    def __init__(
        self, exchange: ExpertParallel, plan: CudagraphDispatcher, ready: Iterable[BatchExecutionDescriptor]
    ) -> None:
        """ready: graphs that all ranks have captured, see `keep_common_graphs`."""
        self._exchange, self._plan, self._codec = exchange, plan, RankStepCodec(plan)
        everywhere = frozenset(ready)
        self._ready = None if everywhere.issuperset(plan.keys) else everywhere

    def coordinate(self, mine: RankStep) -> JointDispatch:
        """Exchange the batches of all ranks, and choose their graphs together."""
        by_rank = self._exchange.ranks.gather_ints(self._codec.encode(RankStep(mine.batch)))
        steps = [RankStep(self._codec.decode(each).batch, self._ready) for each in by_rank]
        agreed = dispatch_jointly(steps, self._plan)
        self._exchange.num_rows = 0 if agreed.descriptor is not None else agreed.num_tokens
        return agreed

    def dispatch(self, batch: UnpaddedBatch | None) -> JointDispatch:
        """Return the joint decision for a rank with this batch; None for a rank without work."""
        return self.coordinate(RankStep(batch))
