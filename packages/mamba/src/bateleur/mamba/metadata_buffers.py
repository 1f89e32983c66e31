"""Buffers at fixed addresses that a metadata builder fills for every step, so that captured graphs can read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.spec import CacheLayout, StatePolicy


@dataclass(frozen=True, slots=True)
class MetadataBuffers:
    """State slots and `RequestStates` row of each request of a step, with room for the maximum number of requests."""

    plan: SlotPlan | ReplayPlan
    """Slots that the step reads and writes."""
    commit_plan: CopyPlan | FoldPlan
    """Copies or folds after the accepted tokens are known."""
    request_row: Tensor
    """(R,) int64 rows of the `RequestStates`."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> MetadataBuffers:
        """Allocate zeroed buffers for `num_reqs` rows."""
        after = FoldPlan if layout.policy is StatePolicy.FOLD else CopyPlan
        row = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        return cls(empty_plan(layout, num_reqs, device), after.allocate(num_reqs, device), row)

    def rows(self, count: int) -> MetadataBuffers:
        """Return views of the buffers of the first `count` rows."""
        plan, commit_plan = self.plan.rows(0, count), self.commit_plan.rows(0, count)
        return MetadataBuffers(plan, commit_plan, self.request_row[:count])


class PiecewiseDecodeBuffers:
    """State slots, token offsets and `RequestStates` rows of the decodes of each step, for piecewise graphs.

    A piecewise graph of mixed batches is captured for a number of tokens, not for a number of decode rows. It therefore
    reads the buffers of the maximum number of rows. Rows after the last decode have no tokens, state slot 0 and request
    row 0, so the operators ignore them.

    Args:
        plan: zeroed plan of the maximum number of rows; this object owns it from then on.
    """

    def __init__(self, plan: SlotPlan | ReplayPlan) -> None:
        tensors = plan.tensors()
        rows = next(iter(tensors.values()))
        self.plan = plan
        self.query_start_loc = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self.request_row = torch.zeros_like(rows)
        self._by_row = [*tensors.values(), self.request_row]

    def fill(
        self,
        plan: SlotPlan | ReplayPlan,
        query_start_loc: Tensor,
        request_row: Tensor | None,
        num_decodes: int,
        num_tokens: int,
    ) -> None:
        """Copy the decode rows of a step (`num_decodes` rows, `num_tokens` tokens) and clear the rows after them."""
        n, sources = num_decodes, [*plan.tensors().values()]
        if request_row is not None:
            sources.append(request_row)
        targets = self._by_row[: len(sources)]
        torch._foreach_copy_([each[:n] for each in targets], [each[:n] for each in sources])
        torch._foreach_zero_([each[n:] for each in targets])
        self.query_start_loc[:n].copy_(query_start_loc[:n])
        self.query_start_loc[n:].fill_(num_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """Return all buffers by name."""
        rows = {"query_start_loc": self.query_start_loc, "request_row": self.request_row}
        return {f"piecewise.{name}": tensor for name, tensor in (self.plan.tensors() | rows).items()}


def empty_plan(layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan | ReplayPlan:
    """Allocate a zeroed plan (state slots per request) for the layout's state policy."""
    if layout.policy is StatePolicy.FOLD:
        return ReplayPlan.allocate(num_reqs, device)
    return SlotPlan.allocate(layout, num_reqs, device)
