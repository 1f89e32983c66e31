"""The decode rows of a step as a piecewise graph holds them: in any batch, whatever follows them."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.planners import ReplayPlan, SlotPlan


class DecodeRows:
    """Plan, starts and request rows of the decodes of each step, at addresses that never change.

    A graph of mixed batches can't know where decodes end, so it takes all rows that there may be: those behind the
    decodes, of prompts or of nobody, have no tokens here, slot 0 and request row 0, which makes them neutral.

    plan: zeros for the most rows, which become this object's.
    """

    def __init__(self, plan: SlotPlan | ReplayPlan) -> None:
        tensors = plan.tensors()
        like = next(iter(tensors.values()))
        self.plan = plan
        self.query_start_loc = torch.zeros(len(like) + 1, dtype=torch.int32, device=like.device)
        self.request_row = torch.zeros_like(like)
        self._slots = [*tensors.values(), self.request_row]

    def fill(
        self,
        plan: SlotPlan | ReplayPlan,
        query_start_loc: Tensor,
        request_row: Tensor | None,
        num_decodes: int,
        num_tokens: int,
    ) -> None:
        """Take the first `num_decodes` rows of a step, whose tokens are the first `num_tokens`; four operators."""
        n, given = num_decodes, [*plan.tensors().values()]
        if request_row is not None:
            given.append(request_row)
        own = self._slots[: len(given)]
        torch._foreach_copy_([each[:n] for each in own], [each[:n] for each in given])
        torch._foreach_zero_([each[n:] for each in own])
        self.query_start_loc[:n].copy_(query_start_loc[:n])
        self.query_start_loc[n:].fill_(num_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """All buffers, by name."""
        rows = {"query_start_loc": self.query_start_loc, "request_row": self.request_row}
        return {f"pieces.{name}": tensor for name, tensor in (self.plan.tensors() | rows).items()}
