"""What a builder writes for every step, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    goes_on: SlotPlan | None = None
    """For mode NONE with drafts: `plan` again, as it is where each row goes on from the state of its first column, or
    begins there."""

    @classmethod
    def allocate(cls, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> StepBuffers:
        """Zeros for so many rows."""
        row = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        rows = (row, row.bool())
        plan = plan_of(layout, num_reqs, device)
        if isinstance(plan, ReplayPlan):
            return cls(plan, FoldPlan.allocate(num_reqs, device), *rows, None)
        one_slot = goes_on = None
        if layout.mode is MambaCacheMode.NONE and layout.num_speculative_tokens:
            goes_on = replace(plan)
        elif layout.mode is MambaCacheMode.NONE:
            offset, write, column = plan.conv_offset, plan.conv_write, plan.run_col
            continuing, starting = (
                SlotPlan(read, write[:, None], read, offset, write, column) for read in (write, plan.ssm_read)
            )
            one_slot = continuing, starting
        return cls(plan, CopyPlan.allocate(num_reqs, device), *rows, one_slot, goes_on)

    def rows(self, count: int) -> StepBuffers:
        """The first rows, as views."""
        one_slot = None
        if self.one_slot is not None:
            continuing, starting = self.one_slot
            one_slot = continuing.rows(0, count), starting.rows(0, count)
        plan, after = self.plan.rows(0, count), self.after.rows(0, count)
        goes_on = None if self.goes_on is None else self.goes_on.rows(0, count)
        return StepBuffers(plan, after, self.request_row[:count], self.resumes[:count], one_slot, goes_on)


def plan_of(layout: CacheLayout, num_reqs: int, device: torch.device | str) -> SlotPlan | ReplayPlan:
    """A neutral plan of the layout's policy."""
    if layout.policy is StatePolicy.FOLD:
        return ReplayPlan.allocate(num_reqs, device)
    return SlotPlan.allocate(layout, num_reqs, device)


def in_first_column(plan: SlotPlan, table: Tensor, computed: Tensor | None = None) -> SlotPlan:
    """Fill a plan on a CPU, of rows that read and write the state of their first column; padded rows have slot 0.

    computed: (R,) integer; rows with 0 have no state to read. None where all have one.
    """
    ssm_read, ssm_write, conv_read, offset, conv_write, run = plan.arrays()
    ssm_write.fill(0)
    for own in (ssm_read, conv_read, conv_write, ssm_write[:, 0]):
        own[...] = table.numpy()[:, 0]
    if computed is not None:
        begins = computed.numpy() == 0
        ssm_read[begins] = conv_read[begins] = 0
    offset.fill(0)
    run.fill(0)
    return plan
