"""What all ranks do, or none has done: errors of one are those of all, with its words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, VerifyReport
from bateleur.cudagraph.verify import ReplayComparison
from bateleur.runner.distributed.agreement import run_on_all_ranks
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.engine import joint_report
from bateleur.runner.errors import PrefixRefused
from together import OneOf, Together, at_once


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Together:
    """Ranks in threads."""
    told = Together(3)
    monkeypatch.setattr(Ranks, "every", lambda ranks, x: OneOf(told, ranks.rank).every(x))
    return told


def outcome(work: Callable[[int], object]) -> Callable[[int], tuple[str, str]]:
    def run(rank: int) -> tuple[str, str]:
        try:
            return "done", str(run_on_all_ranks(Ranks(rank, 3, "none"), lambda: work(rank)))
        except (ValueError, OSError) as error:
            return f"{type(error).__name__} {getattr(error, 'reason', '')}".strip(), str(error)

    return run


def test_what_all_can_do_is_done(three: Together) -> None:
    assert at_once(three, outcome(lambda rank: rank)) == [("done", "0"), ("done", "1"), ("done", "2")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PrefixRefused("corrupt", "a: changed \u00e9"), "PrefixRefused corrupt"),
        (OSError("no space"), "OSError"),
        (ValueError("no room"), "ValueError"),
        (ValueError(""), "ValueError"),
        (ValueError("long " * 1000), "ValueError"),
    ],
)
def test_an_error_of_one_is_that_of_all(three: Together, error: Exception, kind: str) -> None:
    def work(rank: int) -> int:
        if rank:
            raise error if rank == 1 else OSError("later")
        return rank

    first, second, third = at_once(three, outcome(work))
    assert {first[0], second[0], third[0]} == {kind}
    assert first == third, "the first of those where there is one"
    assert first[1].startswith(f"rank 1: {error}"[:900])
    assert second[1] == str(error)


def test_a_graph_that_fails_on_one_rank_fails(three: Together) -> None:
    key = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)

    def run(rank: int) -> list[str | None]:
        found = [ReplayComparison(key, 0.0), ReplayComparison(key, 1.0, "here" if rank == 2 else None)]
        report = joint_report(VerifyReport(tuple(found)), Ranks(rank, 3, "none"))
        return [each.failure for each in report.comparisons]

    assert at_once(three, run) == [[None, "another rank's part differs"]] * 2 + [[None, "here"]]
