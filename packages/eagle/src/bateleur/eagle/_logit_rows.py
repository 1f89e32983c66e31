"""Maps each request's drafts to rows of the logits, for all acceptance rules.

Legend for shapes: R requests, N logit rows, K draft tokens at most, C = K + 1 logit rows of a request at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bateleur.eagle.draw import SampledTokens
from bateleur.eagle.noise import Keys
from bateleur.eagle.rules import Drafts, RejectionOutput, Rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Maps drafts to the logit rows that verify them.

    row_numbers: (C,) int64, the numbers 0 .. C-1. index: (R, C) int64, index among the N logit rows of the i-th logit
    row of each request, clamped to N - 1. drafted: (R, K) bool, whether there is a draft.
    """

    rows: Rows
    tokens: Tensor
    row_numbers: Tensor
    index: Tensor
    drafted: Tensor
    occupied: Tensor
    """(R,) bool: the request has logit rows."""

    @classmethod
    def of(cls, num_logits: int, drafts: Drafts, rows: Rows) -> LogitRows:
        """Assign each draft to the logit row that verifies it. num_logits: N, number of logit rows."""
        tokens_RK, first_R = drafts.tokens, rows.query_start_loc[:-1].long()
        num_R = rows.query_start_loc[1:] - first_R
        row_C = torch.arange(tokens_RK.shape[1] + 1, device=tokens_RK.device)
        index_RC = (first_R.unsqueeze(1) + row_C).clamp_(max=num_logits - 1)
        drafted_RK = (row_C[1:] < num_R.unsqueeze(1)) & (tokens_RK >= 0)
        return cls(rows, tokens_RK, row_C, index_RC, drafted_RK, num_R > 0)

    def owners(self, num_logits: int) -> tuple[Tensor, Keys]:
        """Return the request of every logit row, (N,) int64, and the noise key of its sample. Padding belongs to the
        last request.
        """
        starts, row_N = self.rows.query_start_loc, torch.arange(num_logits, device=self.index.device)
        owner_N = torch.searchsorted(starts[1:].contiguous(), row_N.int(), right=True).clamp_(max=len(self.rows) - 1)
        position_N = self.rows.first_position[owner_N] + (row_N - starts[owner_N])
        return owner_N, Keys(self.rows.seeds[owner_N], position_N)

    def column(self, accepted_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of the logit row after the accepted drafts, the draft token that it verifies, and whether
        there is one; (R,) each.
        """
        end_R1 = accepted_R.unsqueeze(1)
        token_R = pad(self.tokens, (0, 1), value=-1).gather(1, end_R1).squeeze(1)
        drafted_R = pad(self.drafted, (0, 1), value=False).gather(1, end_R1).squeeze(1)
        return self.index.gather(1, end_R1).squeeze(1), token_R, drafted_R

    def run(self, passed_RK: Tensor) -> Tensor:
        """Return how many leading drafts of each request exist and passed their tests `passed_RK`, (R,) int64."""
        return (passed_RK & self.drafted).to(torch.int64).cumprod(1).sum(1)

    def output(self, accepted_R: Tensor, last: SampledTokens) -> RejectionOutput:
        """Emit the accepted drafts and the sample `last` of the row after them.

        A request whose sample is bad (see `SampledTokens`) or that has no rows gets only the drafts.
        """
        end_R1 = accepted_R.unsqueeze(1)
        last_R = last.token_ids.masked_fill(last.bad | ~self.occupied, -1)
        drafts_RC = pad(self.tokens, (0, 1), value=-1)
        tokens_RC = torch.where(self.row_numbers < end_R1, drafts_RC, -1).scatter_(1, end_R1, last_R.unsqueeze(1))
        bad_R = last.bad & self.occupied
        return RejectionOutput(tokens_RC, accepted_R + (last_R >= 0), bad_R)
