"""Expert parallelism: data-parallel ranks agree on each step, and exchange tokens with the experts of all ranks.

Shapes: T tokens of this rank, P rows that each rank sends, A rows of all ranks (size * P), L width of the experts, K
experts of a token.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.cudagraph import BatchExecutionDescriptor, CudagraphDispatcher, JointDispatch, RankStep, UnpaddedBatch
from bateleur.cudagraph.data_parallel import RankStepCodec, dispatch_jointly
from bateleur.runner.distributed.ranks import Ranks


class ExpertParallel:
    """Exchange between data-parallel ranks, each with some of the experts. All ranks run each forward pass together.

    Two collectives per layer: all tokens with their experts go to all ranks, and the outputs of the experts come back.
    They are summed in the order of ranks, so the sum does not depend on the rank or position of a token.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.num_rows = 0  # P of eager passes, at least T of every rank; 0 if T is equal on all ranks, as in graphs

    def gather(self, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (A, L), router weights (A, K) float32 and expert ids (A, K) int64 of all ranks.

        Padding has expert -1.
        """
        (num_tokens, width), top_k = x_TL.shape, weights_TK.shape[1]
        parts = weights_TK, (experts_TK + 1).int(), x_TL.contiguous()
        packed = torch.cat([each.view(torch.uint8) for each in parts], 1)
        if self.num_rows > num_tokens:
            packed = pad(packed, (0, 0, 0, self.num_rows - num_tokens))
        sizes = [4 * top_k, 4 * top_k, width * x_TL.itemsize]
        weights, experts, x = self.ranks.every(packed).flatten(0, 1).split(sizes, 1)
        experts_AK = experts.contiguous().view(torch.int32).long().sub_(1)
        return x.contiguous().view(x_TL.dtype), weights.contiguous().view(torch.float32), experts_AK

    def sum_parts(self, y_AL: Tensor, num_tokens: int) -> Tensor:
        """Return the outputs of all experts for this rank's tokens, summed over the ranks: (num_tokens, L).

        y_AL: weighted outputs of this rank's experts for the tokens of all ranks. num_tokens: tokens of this rank (T).
        """
        parts = self.ranks.swap(y_AL.view(self.ranks.size, -1, y_AL.shape[1]))
        return parts[:, :num_tokens].sum(0)


class DataParallelSync:
    """Chooses one CUDA graph for all ranks, or without a graph the number of tokens that each rank is padded to.

    Each call is one collective, for which the host waits.
    """

    def __init__(
        self, exchange: ExpertParallel, plan: CudagraphDispatcher, ready: Iterable[BatchExecutionDescriptor]
    ) -> None:
        """ready: graphs that all ranks have captured, see `keep_common_graphs`."""
        self._exchange, self._plan, self._codec = exchange, plan, RankStepCodec(plan)
        everywhere = frozenset(ready)
        self._ready = None if everywhere.issuperset(plan.keys) else everywhere

    def dispatch(self, batch: UnpaddedBatch | None) -> JointDispatch:
        """Return the dispatch decision of all ranks. batch: this rank's batch; None for a rank without work."""
        by_rank = self._exchange.ranks.gather_ints(self._codec.encode(RankStep(batch)))
        steps = [RankStep(self._codec.decode(each).batch, self._ready) for each in by_rank]
        agreed = dispatch_jointly(steps, self._plan)
        self._exchange.num_rows = 0 if agreed.descriptor is not None else agreed.num_tokens
        return agreed
