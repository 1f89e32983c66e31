"""Where drafts come from: what a drafter is told of a step, and how many drafts a request's next step verifies."""

# Shape letters: R rows of a step, J = 1 + K.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.cudagraph import Staged
from bateleur.eagle import DraftContext, Drafter, TargetNeeds
from bateleur.runner.models import StepContext
from bateleur.runner.request import Request
from bateleur.runner.sampler import SamplingState
from bateleur.runner.scheduler import StepPlan
from bateleur.runner.table import RequestTable
from bateleur.runner.verifier import Verified, Verifier


class Drafting:
    """Runs a drafter behind the target: every step is followed by one proposal for all of its rows."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, sampling: SamplingState, table: RequestTable
    ) -> None:
        self.drafter = drafter
        self._verifier = verifier
        self._sampling = sampling
        self._table = table

    @property
    def needs(self) -> TargetNeeds:
        """What the drafter wants to see of the target."""
        return self.drafter.needs

    def admit(self, request: Request) -> None:
        """A request got a row."""
        self.drafter.admit(request.row, request.token_ids)

    def propose(
        self,
        plan: StepPlan,
        staged: Staged[StepContext],
        features: tuple[Tensor, ...],
        verified: Verified | None,
        num_valid: Tensor | None,
    ) -> None:
        """Let the drafter see the step, and keep what it proposes. `num_valid` is the verifier's, None if K is 0."""
        context = staged.state
        rows = self._verifier.rows_on_device(plan)
        width = 1 + self.drafter.num_speculative_tokens
        emitted = torch.full((len(plan.rows), width), -1, dtype=torch.int64, device=rows.device)
        next_token = self._verifier.next_tokens(plan)
        if verified is not None:
            drawing = torch.from_numpy(verified.drawing).to(rows.device, non_blocking=True)
            emitted.index_copy_(0, drawing, verified.token_ids)
        if not plan.samples.all():
            next_token = next_token.where(emitted[:, 0] >= 0, self._next_of_prompts(plan, rows.device))
        seeds, temperature = self._sampling.noise_keys(plan.rows)
        drafts = self.drafter.propose(
            DraftContext(
                batch=context.batch,
                attention=context.attention,
                features=features,
                next_token=next_token,
                num_valid=torch.from_numpy(plan.query_lens.astype(np.int64)).to(rows.device)
                if num_valid is None
                else num_valid,
                emitted=emitted,
                rows=rows,
                seeds=seeds,
                temperature=temperature,
                num_drafts=self.drafter.num_speculative_tokens,
                key=staged.key,
                generation=staged.generation,
            )
        )
        self._verifier.keep_drafts(plan, drafts)

    def set_lengths(self, rows: NDArray[np.int64]) -> None:
        """The rows drew a token: their next step verifies drafts."""
        self._table.num_drafts[rows] = self.drafter.num_speculative_tokens

    def _next_of_prompts(self, plan: StepPlan, device: torch.device) -> Tensor:
        """(R,) the token after this step's last in rows whose prompt goes on; 0 in others."""
        at = self._table.num_computed[plan.rows] + plan.query_lens
        known = at < self._table.num_tokens[plan.rows]
        ids = np.where(known, self._table.token_ids[plan.rows, np.where(known, at, 0)], 0)
        return torch.from_numpy(ids.astype(np.int64)).to(device, non_blocking=True)
