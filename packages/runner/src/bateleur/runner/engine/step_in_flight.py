"""A launched step whose results the host does not have yet."""

# Shape letters: R rows of a step, S rows that sample.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bateleur.metadata import Fetch
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling.logprobs import PendingPromptLogprobs
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.spec_decode.proposer import Proposal
from bateleur.runner.utils.arrays import Bools, Int32s


@dataclass(slots=True)
class StepInFlight:
    """A launched step, and the copies to the host that are under way.
    Arrays are in the order of `batch.requests`, not by row of the request table.

    num_drafts: (R,) drafts that each request tests, or will test once its prompt is computed.
    num_released: `Scheduler.num_released` at the launch. If it has changed, a request may have lost its table row.
    fetched: `SampledStep.packed` and the fields of its `logprobs`; None if no request samples.
    scored: prompt log probabilities; None if no request needs any.
    proposal: drafts for the next step of each request; None without a drafter.
    num_tokens: tokens that decoding requests emitted; None before the step is collected.
    appending: requests that are getting tokens of the step, and how many tokens each had before.
    """

    batch: StepBatch
    num_drafts: Int32s
    num_released: int
    fetched: Fetch | None
    scored: PendingPromptLogprobs | None
    proposal: Proposal | None = None
    num_tokens: int | None = None
    appending: tuple[Sequence[Request], Int32s] = ((), np.empty(0, np.int32))

    def present(self) -> Bools:
        """Return (R,) bool: whether each request still has the table row that it had at the launch. A request that lost
        its row gets no other one before this step is collected.
        """
        requests = self.batch.requests
        rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
        present: Bools = rows == self.batch.rows
        return present

    def undo(self, table: RequestTable) -> None:
        """Restore the tokens and drafts that requests had before the step. Can be repeated after an interruption."""
        for request, num_tokens in zip(*self.appending, strict=True):
            request.rewind(int(num_tokens) - len(request.prompt_token_ids))
        for request, num_drafts in zip(self.batch.requests, self.num_drafts.tolist(), strict=True):
            if request.row >= 0:
                table.num_proposed[request.row] = num_drafts
            else:
                request.num_drafts = num_drafts
