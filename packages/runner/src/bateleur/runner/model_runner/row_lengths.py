"""Lengths of running requests on the device, from which steps are staged while another step is in flight."""

# Shape letters: M rows of the request table, R rows of a step.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import CommonAttentionMetadata
from bateleur.runner.utils.device import upload


class RowLengths:
    """Computed tokens of each running request, by row of the request table.

    Lengths are found by table row, never by position in a batch, because that position changes between steps
    (vLLM #53919).
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # The last entry is for padding.
        self._computed_M = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)

    @property
    def computed(self) -> Tensor:
        """Current lengths of all table rows, (M,) int32 on the device."""
        return self._computed_M[:-1]

    def admit(self, rows: NDArray[np.int64], computed: NDArray[np.int32]) -> None:
        """Set the lengths of table rows (R,) that requests just got."""
        device = self._computed_M.device
        self._computed_M.index_copy_(0, upload(rows, device), upload(computed, device))

    def of(self, rows: Tensor) -> Tensor:
        """Return the lengths (R,) int32 of these table rows (R,) int64 before the next step, on the device."""
        return self._computed_M.index_select(0, rows)

    def advance(self, rows: Tensor, batch: CommonAttentionMetadata, num_valid: Tensor) -> None:
        """Set the lengths of `rows` (R,) int64 after a step: its computed tokens plus `num_valid` (R,) int64.

        Can be captured; padding has row `max_rows`.
        """
        reach_R = batch.num_computed_tokens[: len(rows)] + num_valid
        self._computed_M.index_copy_(0, rows, reach_R.int())
