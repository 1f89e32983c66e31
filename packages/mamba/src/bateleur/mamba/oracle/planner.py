"""The functions under test, so that a variant can replace one of them."""

from __future__ import annotations

from functools import partial

from bateleur.mamba.plan import plan_step
from bateleur.mamba.plan_chunks import cut_chunk
from bateleur.mamba.plan_commit import plan_commit
from bateleur.mamba.plan_fold import plan_fold, plan_replay
from bateleur.mamba.prompts import PromptCutter


class Planner:
    """The package's planner. A subclass with a method of its own shows what the simulator says of it."""

    step = staticmethod(plan_step)
    commit = staticmethod(plan_commit)
    replay = staticmethod(plan_replay)
    fold = staticmethod(plan_fold)
    cutter = PromptCutter
    cut = staticmethod(cut_chunk)


class HostPlanner(Planner):
    """The same in numpy, where there is such a form."""

    step = staticmethod(partial(plan_step, eager=True))
    commit = staticmethod(partial(plan_commit, eager=True))
    replay = staticmethod(partial(plan_replay, eager=True))
    fold = staticmethod(partial(plan_fold, eager=True))
