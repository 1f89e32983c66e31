"""Expert parallelism: exchange of tokens between data-parallel ranks in a layer whose experts they share.

Shapes: T tokens of this rank, P rows that each rank sends, A rows of all ranks (size * P), L width of the experts, K
experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.runner.distributed.ranks import Ranks


class ExpertParallel:
    """Exchange between data-parallel ranks, each with some of the experts. Each rank takes part in all ranks' passes.

    Two collectives per layer: all tokens with their experts go to all ranks, and the outputs of the experts come back.
    They are summed in the order of ranks, so the sum does not depend on the rank or position of a token.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.num_rows = 0
        """P of eager passes, at least T of every rank; 0 if T is equal on all ranks, as in graphs."""

    def gather(self, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (A, L), weights (A, K) float32 and experts (A, K) int64 of all ranks. Padding has expert -1."""
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
        """Return the sums (T, L) over all ranks for the tokens of this rank.

        y_AL: this rank's partial sums for all tokens.
        """
        parts = self.ranks.swap(y_AL.view(self.ranks.size, -1, y_AL.shape[1]))
        return parts[:, :num_tokens].sum(0)
