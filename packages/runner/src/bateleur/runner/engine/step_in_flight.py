"""A step between its launch and the moment when the host learns what came of it."""

# Shape letters: R rows of a step, D decoding rows, S rows that draw.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.prompt_logprobs import Scored
from bateleur.runner.sampling.verified import Verified
from bateleur.runner.scheduling.scheduler import StepPlan
from bateleur.runner.spec_decode.proposer import Proposal
from bateleur.runner.utils.device import Fetch

_NOBODY: tuple[Sequence[Request], NDArray[np.int32]] = ((), np.empty(0, np.int32))


@dataclass(slots=True)
class StepInFlight:
    """What the device was given, and what is on its way from there.

    Everything in it belongs to its requests, never to the order of another step: the next step may hold them in other
    places, or not at all.
    """

    plan: StepPlan
    num_drafts: NDArray[np.int32]
    """(R,) drafts that each row was to test, or will once its prompt is computed."""
    num_left: int
    """The scheduler's when it was launched: if that has changed, some request may have lost its row."""
    verified: Verified | None
    fetched: Fetch | None
    scored: Scored | None
    proposal: Proposal | None = None
    """Drafts for the next step of each row; None without a drafter."""
    num_tokens: int | None = None
    """Tokens that its decoding rows emitted; None before it is collected."""
    emitting: tuple[Sequence[Request], NDArray[np.int32]] = _NOBODY
    """Requests that are being given its tokens, and how many tokens each had before."""

    @property
    def is_over(self) -> bool:
        """Whether all of its requests have ended meanwhile, so that nobody waits for it."""
        requests = self.plan.requests
        if requests[0].finish_reason is None:  # mostly it tells alone
            return False
        return all(each.finish_reason is not None for each in requests)

    def present(self, num_left: int) -> NDArray[np.bool_] | None:
        """(R,) whether a request still has its row; None where nobody has lost it, `num_left` being the scheduler's.

        Whoever gave it back gets none before the step is collected.
        """
        if num_left == self.num_left:
            return None
        requests = self.plan.requests
        held = np.fromiter((request.row for request in requests), np.int64, len(requests))
        kept: NDArray[np.bool_] = held == self.plan.rows
        return kept

    def report_drafts(self, table: RequestTable) -> None:
        """Write how many drafts were proposed for the next step of each row that draws."""
        if self.proposal is not None:
            samples, rows = self.plan.samples, self.plan.rows
            table.num_proposed[rows[samples]] = self.proposal.lengths[samples]

    def undo(self, table: RequestTable) -> None:
        """It broke off: its requests have the tokens and drafts that they had before. To be done again if it breaks off
        itself.
        """
        for request, num_tokens in zip(*self.emitting, strict=True):
            request.rewind(int(num_tokens) - len(request.prompt_token_ids))
        for request, num_drafts in zip(self.plan.requests, self.num_drafts.tolist(), strict=True):
            if request.row >= 0:
                table.num_proposed[request.row] = num_drafts
            else:
                request.num_drafts = num_drafts
