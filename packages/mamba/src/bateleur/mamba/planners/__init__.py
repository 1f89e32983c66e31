"""Which slots a step reads and writes, as pure functions of integers on the device: a folder for each planner.

SLOTS has `plan_step`, and `plan_copy` once the accepted tokens are known; FOLD has `plan_replay` and `plan_fold`. Each
in `torch`, which is the specification, and as one `triton` kernel on CUDA; those of SLOTS for the `host` too, in numpy.
"""

from bateleur.mamba.planners.copy import plan_copy
from bateleur.mamba.planners.fold import plan_fold
from bateleur.mamba.planners.plans import CopyPlan, FoldPlan, ReplayPlan, SlotPlan
from bateleur.mamba.planners.replay import plan_replay
from bateleur.mamba.planners.step import plan_step

__all__ = [
    "CopyPlan",
    "FoldPlan",
    "ReplayPlan",
    "SlotPlan",
    "plan_copy",
    "plan_fold",
    "plan_replay",
    "plan_step",
]
