"""How far each running request has come, as the device knows it: what steps are staged from while one is in flight."""

# Shape letters: M rows of the request table, R rows of a step.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.utils.device import upload


class RowLengths:
    """Tokens of each request whose state is in the caches, by row of the request table.

    A count belongs to its row and to no place in a batch: steps may hold their rows in any order, leave some out and
    have others come (vLLM #53919 looked up by the order of the next step what the last one had accepted).
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # The last entry takes what belongs to no request.
        self._computed_M = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)

    @property
    def computed(self) -> Tensor:
        """(M,) int32 on the device: of all rows, as they are now."""
        return self._computed_M[:-1]

    def admit(self, rows: NDArray[np.int64], computed: NDArray[np.int32]) -> None:
        """Requests begin in these rows (R,), with so many tokens found in the caches (R,)."""
        device = self._computed_M.device
        self._computed_M.index_copy_(0, upload(rows, device), upload(computed, device))

    def of(self, rows: Tensor) -> Tensor:
        """(R,) int32 on the device: of these rows (R,) int64, before the step that comes next."""
        return self._computed_M.index_select(0, rows)

    def advance(self, rows: Tensor, batch: CommonAttentionMetadata, num_valid: Tensor) -> None:
        """A step ran these rows (R,) int64: of the tokens of each, the first `num_valid` (R,) int64 stay.

        A graph may record it; rows of padding are `max_rows`.
        """
        reach_R = batch.num_computed_tokens[: len(rows)] + num_valid
        self._computed_M.index_copy_(0, rows, reach_R.int())
