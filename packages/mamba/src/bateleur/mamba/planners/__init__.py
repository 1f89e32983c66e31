"""Planners: compute the state slots that a step reads and writes, as pure functions of tensors on the device.

Under SLOTS (a state slot per draft) use `plan_step` before a step, and `plan_copy` once the accepted tokens are known.
Under FOLD (saved state and ring of later inputs) use `plan_replay` and `plan_fold`. Each module has one planner and its
torch form. `triton` has one kernel per planner, for CUDA.
"""

from bateleur.mamba.planners.copy import plan_copy
from bateleur.mamba.planners.fold import plan_fold
from bateleur.mamba.planners.plans import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.planners.replay import plan_replay
from bateleur.mamba.planners.step import plan_step

__all__ = ["CopyPlan", "FoldPlan", "ReplayPlan", "SlotPlan", "plan_copy", "plan_fold", "plan_replay", "plan_step"]
