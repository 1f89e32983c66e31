"""Planners: compute the state slots that a step reads and writes, as pure functions of tensors on the device.

State policy SLOTS (a state slot per draft): `plan_step` before a step, `plan_copy` once the accepted tokens are known.
State policy FOLD (a saved state and a ring of later inputs): `plan_replay` before, `plan_fold` after. `triton` has a
kernel for each.
"""

from bateleur.mamba.planners.fold import plan_fold, plan_replay
from bateleur.mamba.planners.plans import FORMS, CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.planners.slots import plan_copy, plan_step

__all__ = [
    "FORMS", "CopyPlan", "FoldPlan", "ReplayPlan", "SlotPlan", "plan_copy", "plan_fold", "plan_replay", "plan_step",
]  # fmt: skip
