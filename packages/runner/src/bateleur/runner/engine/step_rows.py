"""From a plan to what decides on a graph for it, and to what is staged."""

# Shape letters: R rows of a step, T tokens.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import UnpaddedBatch
from bateleur.metadata import StepRows, decode_like, uniform_query_len
from bateleur.runner.model_runner.row_lengths import RowLengths
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.rejection_sampler import RejectionSampler
from bateleur.runner.scheduling.step_plan import PerPlan, StepPlan


def ask_for(plan: StepPlan, table: RequestTable) -> UnpaddedBatch:
    """What a step is, for whoever decides which graph it runs on."""
    num_reqs, num_tokens = len(plan.rows), plan.num_tokens
    longest = int(plan.query_lens.max())
    if num_reqs == plan.num_decodes:
        common = longest if num_reqs * longest == num_tokens else None
        return UnpaddedBatch(num_reqs, num_tokens, common, longest, decode_only=True)
    state = (plan.query_lens, plan.is_prefilling, table.num_computed[plan.rows])
    return UnpaddedBatch(
        num_reqs, num_tokens, uniform_query_len(*state), longest, bool(decode_like(*state).all())
    )


class StagedRows:
    """What is staged of plans. Of one that comes again only what is new, so that nobody looks at the rest again."""

    def __init__(self, table: RequestTable, verifier: RejectionSampler, lengths: RowLengths | None) -> None:
        """`lengths`: where the host has bounds only, how far rows have come is staged from these."""
        self._table, self._verifier, self._lengths = table, verifier, lengths
        self._exact = PerPlan(self._of_exact)

    def of(self, plan: StepPlan) -> StepRows:
        """The rows of a step."""
        computed, sampled = self._table.num_computed[plan.rows], self._verifier.input_ids(plan)
        if self._lengths is not None and (slack := self._table.slack[plan.rows]).any():
            return self._rows(plan, computed, sampled, slack == 0)
        if plan.num_decodes < len(plan.rows):  # ids of prompts are others in the next step
            return self._rows(plan, computed, sampled)
        return self._exact(plan).next_step(computed, sampled)

    def _of_exact(self, plan: StepPlan) -> StepRows:
        return self._rows(plan, self._table.num_computed[plan.rows], None)

    def _rows(
        self,
        plan: StepPlan,
        computed: NDArray[np.int32],
        sampled: Tensor | None,
        exact: NDArray[np.bool_] | None = None,
    ) -> StepRows:
        truth = None
        if exact is not None and self._lengths is not None:
            truth = self._lengths.of(self._verifier.rows_on_device(plan))
        return StepRows(
            query_lens=plan.query_lens,
            num_computed_tokens=computed,
            is_prefilling=plan.is_prefilling,
            token_ids=_prompt_tokens(plan, self._table, computed),
            num_computed_is_exact=exact,
            num_computed_tokens_device=truth,
            sampled_token_ids=sampled,
            block_table_rows=plan.rows,
        )


def _prompt_tokens(plan: StepPlan, table: RequestTable, computed_R: NDArray[np.int32]) -> NDArray[np.int32]:
    """(T,) ids of the step; those of decoding rows are filled in on the device and are 0 here."""
    tokens_T = np.zeros(plan.num_tokens, dtype=np.int32)
    n = plan.num_decodes
    if n < len(plan.rows):
        lens, first = plan.query_lens[n:], plan.num_decode_tokens
        starts = np.cumsum(lens) - lens
        columns = np.arange(len(tokens_T) - first) + np.repeat(computed_R[n:] - starts, lens)
        tokens_T[first:] = table.token_ids[np.repeat(plan.rows[n:], lens), columns]
    return tokens_T
