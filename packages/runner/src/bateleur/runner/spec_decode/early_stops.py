"""Chains of drafts that stop where their head is unsure, and what their rows might have had."""

# Shape letters: R rows of a step.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bateleur.eagle import Drafter, EagleSpeculator
from bateleur.runner.arguments import refuse

_LEAST_CHANCE = 0.05
"""Of the shipped head, whose chains of 4 then gain most over temperatures 0 and 0.8: a greedy row accepts drafts of
which the law at 0.8 is not sure, and loses by stops at 0.2; steps of other lengths than the one before take longer,
too.
"""


class EarlyStops:
    """Below which chance a drafter's chains stop, see `DraftContext.least_chance`; and by row of the request table, how
    many drafts might have been made of those that were made last.
    """

    def __init__(self, drafter: Drafter, least_chance: float | None, num_rows: int, *, may: bool) -> None:
        """may: whether the engine sees how many drafts there are, and decides alone.

        Raises ValueError for a `least_chance` above 0 of a drafter that does not stop there, or where it may not.
        """
        stops = may and isinstance(drafter, EagleSpeculator) and drafter.stops_early
        if least_chance and not stops:
            refuse(
                "draft_least_chance",
                least_chance,
                "0 or None where a head's passes are not run one by one on a CPU, by one process, without graphs and "
                "under speculative_rule 'coupled'",
            )
        default = _LEAST_CHANCE if stops else 0.0
        self.least_chance = default if least_chance is None else least_chance
        self._allowed: NDArray[np.int32] = np.zeros(num_rows, np.int32)

    def admit(self, row: int) -> None:
        """A request got a row."""
        self._allowed[row] = 0

    def allow(self, rows: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """So many drafts of rows (R,) are asked for."""
        if self.least_chance:
            self._allowed[rows] = lengths

    def allowed(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """(R,) drafts that were asked for of these rows last, where some are made; None for as many as were made."""
        return self._allowed[rows] if self.least_chance else None


def at_least(made: NDArray[np.int32], allowed: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """(R,) drafts that were asked for of rows that have some."""
    return made if allowed is None else np.maximum(made, allowed) * (made > 0)
