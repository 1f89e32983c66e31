"""Plans how many of the proposed drafts the next step tests for each request."""

# Shape letters: R rows.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.sampler import Sampler


class DraftPlanner:
    """Plans the drafts of the next step from `RequestTable.num_proposed`, before the step is scheduled.

    max_drafts: maximum drafts of a request (K). max_drafted_len: maximum sequence length, drafts included, up to which
    the drafter can propose.
    graphed: numbers of drafts, equal for all requests, for which steps have CUDA graphs; empty without graphs.
    waits_for_length: whether requests wait for their exact length before drafts are planned, because sampled tokens
        depend on the number of drafts, as under the acceptance rules RATIO and BLOCK.
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
        """Write `num_drafts`, `num_draft_slots` and `must_wait` of the request table for all decoding requests.

        A request verifies those proposed drafts that its remaining length allows. While a step is in flight, only
        bounds of the length are known. If the request's tokens depend on the number of drafts, it waits until the
        length is known.
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
        """Return how many draft slots (drafts and padding) each request gets for `lengths` drafts, (R,).

        room: maximum slots of each request. With graphs all requests get as many slots as the graph for the longest
        one, because batches of different lengths would run eagerly (vLLM #35387).
        """
        if not self._graphed:
            return lengths
        longest = lengths.max(initial=0)
        common = next((n for n in self._graphed if n >= longest), 0)
        return np.maximum(lengths, np.minimum(common, room))
