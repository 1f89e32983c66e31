"""Which slots a step reads and writes, as pure functions of integers on the device: a module for each planner.

SLOTS has `plan_step`, and `plan_copy` once the accepted tokens are known; FOLD has `plan_replay` and `plan_fold`. Each
stands beside its form in torch's operators, which specifies the others: in `triton`, for CUDA, all are one kernel each;
`host` has them in numpy, and `native` has FOLD's first one in C.
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
