"""Data-parallel ranks whose draft heads share experts agree on the number of drafts before each proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.distributed.expert_parallel import ExpertParallel
from bateleur.runner.spec_decode.mtp_head import MtpHead


class DraftSync:
    """Makes all ranks run equally many draft passes, by one exchange of two integers.

    Each pass of the head runs the collectives of its experts. But the policies of the ranks may choose different
    numbers of drafts, and an idle rank needs none.
    """

    def __init__(self, head: MtpHead, exchange: ExpertParallel) -> None:
        self._head, self._exchange = head, exchange

    def agree(self, num_rows: int, num_drafts: int) -> int:
        """Exchange the numbers of requests and drafts with all ranks, and return the largest number of drafts."""
        by_rank = self._exchange.ranks.gather_ints([num_rows, num_drafts])
        self._exchange.num_rows = max(rows for rows, _ in by_rank)
        return max(drafts for _, drafts in by_rank)

    def idle(self) -> int:
        """Take part in the proposals of other ranks, on a rank without requests; returns their number of drafts.

        A dummy token goes through the head, and nothing is stored.
        """
        drafts = self.agree(1, 0)
        for _ in range(drafts):
            self._pass()
        return drafts

    def _pass(self) -> None:
        like = self._head.fc_proj.weight
        zero = torch.zeros(1, dtype=torch.int64, device=like.device)
        hidden = torch.zeros(1, like.shape[0], dtype=like.dtype, device=like.device)
        self._head.forward(zero, hidden, zero, _no_attention)


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)
