"""The functions under test, so that a variant can replace one of them."""

from __future__ import annotations

from collections.abc import Callable

from bateleur.mamba.planners import plan_copy, plan_fold, plan_replay, plan_step
from bateleur.mamba.prefill_chunks import PrefillChunker
from bateleur.mamba.state_manager import MambaStateManager, StateBlockPool
from oracle.pool import Pool


class Planner:
    """The planners, chunker and state manager under test. Subclasses replace members to plant defects."""

    step = staticmethod(plan_step)
    copy = staticmethod(plan_copy)
    replay = staticmethod(plan_replay)
    fold = staticmethod(plan_fold)
    chunker = PrefillChunker
    pages = MambaStateManager
    pool: Callable[[int], StateBlockPool] = Pool
    """Return a pool of `num_pages` slots, including the null slot."""
