"""How many of the proposed drafts the next step of each row tests."""

# Shape letters: R rows.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.sampler import Sampler


class DraftPlanner:
    """Plans the drafts of the next step from `RequestTable.num_proposed`, before the step is scheduled.

    max_drafts: K. max_drafted_len: tokens of a sequence that the drafter can propose for, drafts included.
    graphed: numbers of drafts, equal in all rows, that steps have CUDA graphs for; empty without graphs.
    waits_for_length: tokens depend on the number of drafts (rules RATIO and BLOCK).
    """

    def __init__(
        self,
        table: RequestTable,
        sampler: Sampler,
        max_drafts: int,
        max_drafted_len: int,
        graphed: Sequence[int],
        *,
        waits_for_length: bool,
    ) -> None:
        self._table, self._sampler, self._max_drafts = table, sampler, max_drafts
        self._max_model_len = table.max_model_len
        self._max_drafted_len = min(max_drafted_len, self._max_model_len)
        self._graphed, self._waits_for_length = sorted(graphed), waits_for_length

    def plan(self) -> None:
        """Write `num_drafts`, `num_draft_slots` and `must_wait` of all rows that decode.

        A row tests the proposed drafts that are useful after the tokens it may have by then. With a step in flight
        only bounds of that number are known. If the tokens of a row depend on it, the row waits until it is known.
        """
        table = self._table
        rows = np.flatnonzero(table.num_computed >= np.maximum(table.prefill_len, 1))
        proposed = table.num_proposed[rows]
        useful = table.num_useful_drafts(rows, self._max_drafted_len, self._max_drafts, at_least_one=False)
        lengths = np.minimum(proposed, useful)
        table.num_drafts[rows] = lengths
        table.num_draft_slots[rows] = self._padded(lengths, self._max_model_len - table.num_tokens[rows])
        uncertain = table.num_uncertain[rows] > 0
        table.must_wait[rows] = uncertain & (proposed > useful) & self._waits_for_length
        if np.count_nonzero(uncertain):
            open_rows = rows[uncertain]
            most = table.num_tokens[open_rows] - table.prompt_len[open_rows]
            least = most - table.num_uncertain[open_rows]
            depends = self._sampler.depends_on_length(open_rows, least, most + table.num_drafts[open_rows])
            table.must_wait[open_rows[depends]] = True

    def _padded(self, lengths: NDArray[np.int32], room: NDArray[np.int32]) -> NDArray[np.int32]:
        """(R,) slots for `lengths` drafts. With graphs all rows get as many as the graph for the longest row, because
        rows of different lengths would run eagerly (vLLM #35387).
        """
        if not self._graphed:
            return lengths
        longest = lengths.max(initial=0)
        common = next((n for n in self._graphed if n >= longest), 0)
        return np.maximum(lengths, np.minimum(common, room))
