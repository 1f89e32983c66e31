"""What ranks with tokens of their own tell each other in a layer whose experts they share.

Shapes: T tokens of this rank, P rows that each rank brings, A of all ranks (size * P), L width of the experts, K of
them for a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.runner.distributed.ranks import Ranks


class ExpertParallel:
    """The data-parallel ranks of a model: each has some of the experts, and takes part in every pass of the others.

    Two collectives a layer: all tokens with their experts go to all ranks, and what the experts of each made of them
    comes back. Its sum is taken rank by rank, so it does not depend on who brings a token, nor on its row.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.num_rows = 0
        """P of the passes that run eagerly, no less than T of any rank; 0 where T is the same on all, as in graphs.
        Whoever runs a pass agrees on it with the others."""

    def gather(self, x_TL: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(A, L), (A, K) float32 and (A, K) int64 of all ranks; the experts of rows that nobody brings are -1."""
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
        """(T, L) of this rank's tokens: the sum of what all have for them, of (A, L) that this one has for all."""
        parts = self.ranks.swap(y_AL.view(self.ranks.size, -1, y_AL.shape[1]))
        return parts[:, :num_tokens].sum(0)
