"""What a builder writes for every step, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.planners import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What is written for every step, at addresses that never change: for the most rows, or views for fewer."""

    plan: SlotPlan | ReplayPlan
    after: CopyPlan | FoldPlan
    """What follows acceptance."""
    request_row: Tensor
    """(R,) int64."""
    resumes: Tensor
    """(R,) bool, the row has a state."""
    one_slot: tuple[SlotPlan, SlotPlan] | None
    """For mode NONE without drafts, where a row reads and writes one slot, plans over the buffers of `plan`: of rows
    that all have a state, whose read and write slots are one buffer, and of rows of which some have none."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> StepBuffers:
        """Zeros for so many rows."""
        row = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        rows = (row, row.bool())
        plan = plan_of(layout, num_reqs, device)
        if isinstance(plan, ReplayPlan):
            return cls(plan, FoldPlan.allocate(num_reqs, device), *rows, None)
        one_slot = None
        if layout.mode is MambaCacheMode.NONE and not layout.num_speculative_tokens:
            offset, write, column = plan.conv_offset, plan.conv_write, plan.run_col
            continuing, starting = (
                SlotPlan(read, write[:, None], read, offset, write, column) for read in (write, plan.ssm_read)
            )
            one_slot = continuing, starting
        return cls(plan, CopyPlan.allocate(num_reqs, device), *rows, one_slot)

    def rows(self, count: int) -> StepBuffers:
        """The first rows, as views."""
        one_slot = None
        if self.one_slot is not None:
            continuing, starting = self.one_slot
            one_slot = continuing.rows(0, count), starting.rows(0, count)
        plan, after = self.plan.rows(0, count), self.after.rows(0, count)
        return StepBuffers(plan, after, self.request_row[:count], self.resumes[:count], one_slot)


def plan_of(layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan | ReplayPlan:
    """A neutral plan of the layout's policy."""
    if layout.policy is StatePolicy.FOLD:
        return ReplayPlan.allocate(num_reqs, device)
    return SlotPlan.allocate(layout, num_reqs, device)
