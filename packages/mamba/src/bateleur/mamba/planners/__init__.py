"""Planners: compute the state slots that a step reads and writes, as pure functions of tensors on the device.

Under SLOTS (a state slot per draft) use `plan_step` before a step, and `plan_copy` once the accepted tokens are known.
Under FOLD (saved state and ring of later inputs) use `plan_replay` and `plan_fold`. `triton` has a kernel for each.
"""

from bateleur.mamba.planners.fold import plan_fold, plan_replay
from bateleur.mamba.planners.plans import FORMS, CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.planners.slots import plan_copy, plan_step

__all__ = [
    "FORMS", "CopyPlan", "FoldPlan", "ReplayPlan", "SlotPlan", "plan_copy", "plan_fold", "plan_replay", "plan_step",
]  # fmt: skip
