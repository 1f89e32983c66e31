"""What a captured end of a step is told of its rows, and what it leaves for whoever comes behind it."""

# Shape letters: N rows of a step at most, J = 1 + K tokens of a row at most.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.runner.utils.device import upload

_POISON = torch.iinfo(torch.int32).max - 6
"""No token, and more tokens than a row has."""


class EndRows:
    """At addresses that never change; padding is 0, but for `table_rows`.

    Attributes:
        table_rows: (N,) int64 rows of the request table; `max_rows` in padding.
        seeds: (N,) int64. num_drafts: (N,) int64 drafts under test, of the places that there are.
        law: (N, 4) float32, the values of each row's `SamplingMetadata`.
        emitted: (N, J) int64 tokens of the last step that ended, -1 behind the last.
        num_valid: (N,) int64 tokens of each row that stay. Behind the rows of a step that ended eagerly both hold
            whatever was there before: nobody may read them for a row without a token.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        """Of a request table of `max_rows` rows; `width` is J."""
        self._max_rows, self._device = max_rows, device
        even = max_rows + max_rows % 2  # every part begins at 16 bytes, so that Triton compiles a kernel once
        self._staged = torch.zeros(5, even, dtype=torch.int64, device=device)
        self.table_rows, self.seeds, self.num_drafts = self._staged[:3, :max_rows]
        self.sampling_values = self._staged[3:].view(-1).view(torch.float32).view(even, 4)[:max_rows]
        self.emitted = torch.empty(max_rows, width, dtype=torch.int64, device=device)
        self.num_valid = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._known = b""
        self.clear()

    def clear(self) -> None:
        """No row belongs to a request, and none emitted anything."""
        self.emitted.fill_(-1)
        self.num_valid.fill_(1)
        nothing = np.zeros(0, np.int64)
        self.stage(nothing, nothing, nothing, np.zeros((0, 4), np.float32))

    def stage(
        self,
        table_rows: NDArray[np.int64],
        seeds: NDArray[np.int64],
        num_drafts: NDArray[np.integer],
        sampling_values: NDArray[np.float32],
    ) -> None:
        """Rows of a step; nothing is sent if they are those of the last."""
        values, count = np.zeros(self._staged.shape, np.int64), len(table_rows)
        values[0, count:] = self._max_rows
        for line, given in zip(values, (table_rows, seeds, num_drafts), strict=False):
            line[:count] = given
        values[3:].reshape(-1).view(np.float32).reshape(-1, 4)[:count] = sampling_values
        if (contents := values.tobytes()) != self._known:
            self._staged.copy_(upload(values, self._device))
            self._known = contents

    def poison(self) -> None:
        """Spoil all; the next staging sends what is staged anew."""
        self._staged.fill_(-1)
        self._known = b""
        self.spoil()

    def spoil(self) -> None:
        """Spoil what the last step left, before the next one leaves what it emitted."""
        self.emitted.fill_(_POISON)
        self.num_valid.fill_(_POISON)

    def leave(self, emitted: Tensor, num_valid: Tensor) -> None:
        """What the leading rows of a step emitted (n, J), or (n, 1) without drafts, and how many of their tokens stay
        (n,); fit for capture.
        """
        n, width = emitted.shape
        if width < self.emitted.shape[1]:
            self.emitted[:n, width:].fill_(-1)
        self.emitted[:n, :width].copy_(emitted)
        self.num_valid[: len(num_valid)].copy_(num_valid)

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name; constant for life."""
        return {
            "staged": self._staged.data_ptr(),
            "emitted": self.emitted.data_ptr(),
            "num_valid": self.num_valid.data_ptr(),
        }
