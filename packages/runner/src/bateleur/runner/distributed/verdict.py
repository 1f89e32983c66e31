"""Which of several ranks is to blame, and for what, by what was heard of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bateleur.runner.distributed.connections import At, Failed, Gone, Silent

Sign = Failed | Gone | At | Silent


class Verdict(NamedTuple):
    """Who, and why."""

    rank: int
    cause: str
    """Behind "rank 1"."""
    trace: str = ""


def verdict(signs: Mapping[int, Sign], seconds: float) -> Verdict:
    """What came first: who raised of itself, died, does not answer, is behind the others, or is not where they are.

    seconds: since when they are at the same order.
    """
    found = min(
        (_weigh(sign, rank, signs, seconds) for rank, sign in signs.items()), key=lambda each: each[0]
    )
    return found[1]


def _weigh(
    sign: Sign, rank: int, signs: Mapping[int, Sign], seconds: float
) -> tuple[tuple[int, int], Verdict]:
    match sign:
        case Failed(error, trace, in_collective):
            return (4 if in_collective else 0, rank), Verdict(rank, f"raised {error}", trace)
        case Gone(how):
            return (1, rank), Verdict(rank, how)
        case Silent():
            return (2, rank), Verdict(rank, f"does not answer, {seconds:.3g} s after a step began")
        case At(num_orders, idle, in_collective, frame):
            where = "waiting for orders" if idle else frame
            stuck = Verdict(rank, f"has stood still for {seconds:.3g} s {where}")
            others = [other for other in signs.values() if isinstance(other, At)]
            behind = num_orders < max(other.num_orders for other in others) or not in_collective
            return (3 if behind and not idle else 5, rank), stuck
