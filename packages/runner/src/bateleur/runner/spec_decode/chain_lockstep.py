"""What data-parallel ranks agree on before each proposal of a head whose experts they share."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.models.exchange import Exchange
from bateleur.runner.spec_decode.mtp_head import MtpHead


class ChainLockstep:
    """How many drafts all ranks make, by one exchange of two integers: each pass of the head, one for every draft, has
    the collectives of its experts. A policy may want other numbers on other ranks, and a rank without work wants none.
    """

    def __init__(self, head: MtpHead, exchange: Exchange) -> None:
        self._head, self._exchange = head, exchange

    def agree(self, num_rows: int, num_drafts: int) -> int:
        """The most drafts that any rank wants of its rows."""
        told = self._exchange.ranks.tell_all([num_rows, num_drafts])
        self._exchange.num_rows = max(rows for rows, _ in told)
        return max(drafts for _, drafts in told)

    def idle(self) -> int:
        """Without rows, take part in the proposals of others; returns their number of drafts. Nothing is stored: a
        token of nobody goes through the head, and attention gives nothing.
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
