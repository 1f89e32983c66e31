"""The planners against the symbolic oracle: 20,000 requests without a difference, and planted defects are found.

`python packages/mamba/tests/oracle --runs 1000000` runs the same a million times.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bateleur.mamba import CacheLayout, CopyPlan, MambaCacheMode, PrefixRetention, SlotPlan, StatePolicy
from oracle import Case, Kind, Planner, run, simulate

NONE, ALIGN, ALL = MambaCacheMode
SLOTS, FOLD = StatePolicy


def case(mode=ALL, policy=SLOTS, drafts=2, block=4, ring=16, kind=Kind.INPUTS) -> Case:
    layout = CacheLayout(mode, 24 if mode is NONE else block, drafts, 24, policy, ring)
    return Case(layout, PrefixRetention.of(layout), 2, kind)


def found(planner: Planner, which: Case) -> dict[str, int]:
    sim = simulate(which, 100, planner, np.random.default_rng(5))
    assert sim.seen["rows"] > 500
    return {kind: count for kind, count in sim.found.items() if count}


@pytest.mark.slow
def test_twenty_thousand_requests():
    report = run(20_000)
    assert report.runs >= 20_000
    assert report.differences == 0, f"{report}, {report.failing}"
    assert report.seen["hits"] > 20_000
    assert report.seen["preempted"] > 4_000


class OldConvAnchor(Planner):
    """Defect A: the window is read from the last computed token's block, the state from where it was written."""

    @staticmethod
    def step(layout, table, computed, query_lens, accepted=None, out=None, *, prev_col=None):
        plan = Planner.step(layout, table, computed, query_lens, accepted, out, prev_col=prev_col)
        n = computed.long() * (query_lens > 0)
        read = table.gather(1, ((n - 1) // layout.block_size).clamp_min(0)[:, None])[:, 0]
        return replace(plan, conv_read=read * (n > 0))


class NoBoundaryCopies(Planner):
    """Defect B: boundaries passed by draft tokens are published without a copy."""

    @staticmethod
    def copy(layout, table, computed, query_lens, num_drafts, accepted, plan, out=None):
        done = Planner.copy(layout, table, computed, query_lens, num_drafts, accepted, plan, out)
        kept = torch.minimum(accepted.clamp_min(1), 1 + num_drafts)
        zero = torch.zeros_like(done.dst)
        return CopyPlan(zero, zero, zero, zero, kept, done.prev_col)


def test_m02_defect_a_shows():
    assert found(Planner(), case()) == {}
    differences = found(OldConvAnchor(), case())
    assert differences["window"] > 100
    assert differences["state"] > 0  # what a wrong window makes


def test_m03_defect_b_shows():
    differences = found(NoBoundaryCopies(), case())
    assert differences["boundary"] > 100


class ForgetsTheAnchor(Planner):
    """The column of the last accepted token's block, as if the previous step had stopped there. vllm #39809."""

    @staticmethod
    def step(layout, table, computed, query_lens, accepted=None, out=None, *, prev_col=None):
        return Planner.step(layout, table, computed, query_lens, accepted, out)


class TakesDraftsAsAccepted(Planner):
    @staticmethod
    def fold(layout, plan, computed, query_lens, accepted, **kwargs):
        return Planner.fold(layout, plan, computed, query_lens, query_lens, **kwargs)


class NeverFlushes(Planner):
    @staticmethod
    def fold(layout, plan, computed, query_lens, accepted, *, flush, scanned, out):
        return Planner.fold(layout, plan, computed, query_lens, accepted, scanned=scanned, out=out)


class FoldsPastBoundaries(Planner):
    @staticmethod
    def fold(layout, plan, computed, query_lens, accepted, **kwargs):
        wide = replace(layout, mode=NONE, block_size=layout.max_model_len)
        return Planner.fold(wide, plan, computed, query_lens, accepted, **kwargs)


class LeavesGarbageInPaddedRows(Planner):
    @staticmethod
    def step(layout, table, computed, query_lens, accepted=None, out=None, *, prev_col=None):
        plan: SlotPlan = Planner.step(layout, table, computed, query_lens, accepted, out, prev_col=prev_col)
        return replace(plan, conv_write=table[:, 0].long())


@pytest.mark.parametrize("policy", [SLOTS, FOLD])
@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_state(kind, policy):
    """Where there are windows alone no state is looked at, and what is wrong with windows shows all the same."""
    assert found(Planner(), case(policy=policy, kind=kind)) == {}
    broken = found(NoBoundaryCopies() if policy is SLOTS else NeverFlushes(), case(policy=policy, kind=kind))
    assert broken["boundary"] > 0
    assert ("state" in broken) == (kind is not Kind.WINDOW)


def test_what_is_made_over_a_wrong_state_is_wrong():
    """Where entries of rings are inputs, a request whose checkpoint comes back is right again; not where they are
    corrected."""
    left = {kind: found(MissesACheckpoint(), case(NONE, FOLD, ring=16, kind=kind)) for kind in Kind}
    assert left[Kind.WINDOW] == {}
    assert left[Kind.CORRECTED]["state"] > left[Kind.INPUTS]["state"] > 0


class MissesACheckpoint(Planner):
    """Takes rings to follow a zero state in one step."""

    def __init__(self):
        self.steps = 0

    def replay(self, *args):
        self.steps += 1
        plan = Planner.replay(*args)
        return plan if self.steps != 6 else replace(plan, slot=plan.slot * (plan.ring_len == 0))


@pytest.mark.parametrize(
    ("planner", "which", "kind"),
    [
        (ForgetsTheAnchor, case(), "state"),
        (ForgetsTheAnchor, case(ALIGN), "state"),
        (TakesDraftsAsAccepted, case(policy=FOLD), "state"),
        (NeverFlushes, case(policy=FOLD), "state"),
        (FoldsPastBoundaries, case(policy=FOLD), "boundary"),
        (LeavesGarbageInPaddedRows, case(NONE), "neutral"),
    ],
)
def test_a_broken_planner_shows(planner, which, kind):
    assert found(planner(), which)[kind] > 0


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["oracle", "--runs", "64", "--seed", "3"])
    assert runpy.run_path(str(Path(__file__).parent / "oracle"))["main"]() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "differences: 0"
