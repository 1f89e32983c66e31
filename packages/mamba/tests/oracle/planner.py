"""The functions under test, so that a variant can replace one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bateleur.mamba.planners import plan_copy, plan_fold, plan_replay, plan_step
from bateleur.mamba.prefill_chunks import PrefillChunker
from bateleur.mamba.state_manager import MambaStateManager, StateBlockPool
from oracle.pool import Pool


class Planner:
    """What an engine plans with. A subclass with a member of its own shows what the simulator says of it."""

    step = staticmethod(plan_step)
    copy = staticmethod(plan_copy)
    replay = staticmethod(plan_replay)
    fold = staticmethod(plan_fold)
    chunker = PrefillChunker
    pages = MambaStateManager
    pool: Callable[[int], StateBlockPool] = Pool
    """Of so many pages, the null page included."""


class HostPlanner(Planner):
    """The same in numpy, where there is such a form: under SLOTS."""

    step = staticmethod(partial(plan_step, eager=True))
    copy = staticmethod(partial(plan_copy, eager=True))
