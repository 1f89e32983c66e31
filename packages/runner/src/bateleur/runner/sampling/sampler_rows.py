"""Device buffers of the rejection sampler: tokens to compute next, and sampling inputs of the current step."""

# Shape letters: M rows of the request table, N rows of a step at most, J = 1 + K for K drafts at most.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.utils.device import upload

_POISON = torch.iinfo(torch.int32).max - 6
"""No token id, and more tokens than a row can have."""


class SamplerRows:
    """Buffers of the eager and the captured rejection sampler. Addresses never change, so that graphs can read them.

    By row of the request table:
      next_ids: (1 + M, J) int64, the last sampled token, then drafts, -1 for no draft. Row M is for padding.

    By request that samples in the current step; padding is 0, except for `table_rows`:
        table_rows: (N,) int64 rows of the request table; M in padding.
        seeds: (N,) int64. num_drafts: (N,) int64 drafts to test. values: (N, 4) float32, see `SamplingMetadata`.
        emitted: (N, J) int64 emitted tokens, -1 after the last.
        num_valid: (N,) int64 tokens of the request that stay. Requests without a token keep old values of both.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        """max_rows: M, rows of the request table. width: J, one more than the maximum number of drafts."""
        self._max_rows, self._device = max_rows, device
        self.next_ids = torch.zeros((1 + max_rows, width), dtype=torch.int64, device=device)
        even = max_rows + max_rows % 2  # each part is aligned to 16 bytes, so that Triton compiles a kernel once
        self._staged = torch.zeros(5, even, dtype=torch.int64, device=device)
        self.table_rows, self.seeds, self.num_drafts = self._staged[:3, :max_rows]
        self.values = self._staged[3:].view(-1).view(torch.float32).view(even, 4)[:max_rows]
        self.emitted = torch.empty(max_rows, width, dtype=torch.int64, device=device)
        self.num_valid = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._draft_slots = torch.arange(width - 1, device=device)
        self.clear()

    def clear(self) -> None:
        """Stage an empty batch, and clear the emitted tokens."""
        self.emitted.fill_(-1)
        self.num_valid.fill_(1)
        nothing = np.zeros(0, np.int64)
        self.stage(nothing, nothing, nothing, np.zeros((0, 4), np.float32))

    def stage(
        self,
        table_rows: NDArray[np.int64],
        seeds: NDArray[np.int64],
        num_drafts: NDArray[np.integer],
        values: NDArray[np.float32],
    ) -> None:
        """Send the sampling inputs of a step's requests to the device, in one copy."""
        staged, count = np.zeros(self._staged.shape, np.int64), len(table_rows)
        staged[0, count:] = self._max_rows
        for line, given in zip(staged, (table_rows, seeds, num_drafts), strict=False):
            line[:count] = given
        staged[3:].reshape(-1).view(np.float32).reshape(-1, 4)[:count] = values
        self._staged.copy_(upload(staged, self._device))

    def drafts(self, num_rows: int) -> Tensor:
        """Return drafts (R, K) int64 to test for the first `num_rows` requests, -1 for no draft. Can be captured."""
        drafts_RK = self.next_ids.index_select(0, self.table_rows[:num_rows])[:, 1:]
        return drafts_RK.where(self._draft_slots < self.num_drafts[:num_rows, None], -1)

    def emit(self, tokens: Tensor, num_emitted: Tensor) -> None:
        """Store the tokens that the first R requests emitted, and make the last one the next to compute.

        Can be captured.
        tokens: (R, J). num_emitted: (R,) int64, number of tokens of each request.
        """
        num_rows = len(num_emitted)
        last_R1 = (num_emitted - 1).clamp_min_(0).unsqueeze(1)
        last_R = tokens.gather(1, last_R1).squeeze(1).clamp_min_(0)
        self.next_ids[:, 0].index_copy_(0, self.table_rows[:num_rows], last_R)
        self.emitted[:num_rows].copy_(tokens)
        self.num_valid[:num_rows].copy_(num_emitted)

    def keep(self, table_rows: Tensor, tokens: Tensor, drafts: Tensor) -> None:
        """Store the next tokens (R,) and drafts (R, K) for rows of the request table. Can be captured."""
        self.next_ids.index_copy_(0, table_rows, torch.cat((tokens.unsqueeze(1), drafts), 1))

    def poison(self) -> None:
        """Fill the inputs of the step with invalid values."""
        self._staged.fill_(-1)
        self.poison_emitted()

    def poison_emitted(self) -> None:
        """Fill the outputs of the last step with invalid values."""
        self.emitted.fill_(_POISON)
        self.num_valid.fill_(_POISON)

    def addresses(self) -> dict[str, int]:
        """Addresses of the buffers of a step, by name."""
        return {name: getattr(self, name).data_ptr() for name in ("_staged", "emitted", "num_valid")}
