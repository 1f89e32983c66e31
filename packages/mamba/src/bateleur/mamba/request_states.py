"""Per-request values that the planners carry from one step to the next, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import upload

OnHost = Sequence[int] | NDArray[np.integer[Any]] | Tensor
"""Integers (R,) in host memory."""


@dataclass(frozen=True, slots=True)
class RowStates:
    """The values that planners carry between steps, for the requests of one batch, each (R,) int64.

    They are the accepted tokens of the previous step, the first block-table column that it wrote (state policy SLOTS),
    and the tokens in the saved state (FOLD).
    """

    accepted: Tensor
    """Accepted tokens of the request's previous step, in [1, 1 + K]; 1 if there was none."""
    prev_col: Tensor
    """State policy SLOTS: block-table column that the previous step wrote first; -1 if there was none."""
    base: Tensor
    """State policy FOLD: number of tokens in the saved state."""


class RequestStates:
    """Accepted tokens, last block-table columns and saved-state lengths of all running requests of a Mamba group.

    Values belong to a request row, not to a position in the batch: `gather` returns them in batch order, `scatter`
    stores the new ones. Row 0 is null: padded rows use it, and it always has neutral values. KV-cache groups with
    different layouts need separate objects. All values are in one tensor at a fixed address.

    Args:
        num_rows: maximum number of running requests, plus the null row.
        device: device of the tensor.

    Raises ValueError for fewer than two rows (the null row and one to use).
    """

    _NEUTRAL = (1, -1, 0)

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        if num_rows < 2:
            raise ValueError(f"num_rows is {num_rows}; it must be at least 2, of which row 0 is null")
        self._neutral = torch.tensor(self._NEUTRAL, device=device)[:, None]
        self._states = self._neutral.repeat(1, num_rows)
        self._null = self._states[:, :1]

    @property
    def num_rows(self) -> int:
        """Number of request rows, including the null row."""
        return self._states.shape[1]

    @property
    def values(self) -> Tensor:
        """(3, num_rows) int64: last step's accepted tokens and first block-table column, tokens in the saved state."""
        return self._states

    def admit(self, rows: OnHost, computed: OnHost | int = 0) -> None:
        """Reset rows for new or resumed requests, with `computed` tokens of a prefix-cache hit each (0 for no hit)."""
        index = np.asarray(rows).astype(np.int64)
        fresh = np.array(self._NEUTRAL)[:, None].repeat(len(index), 1)
        fresh[2] = np.asarray(computed)
        device = self._states.device
        self._states.index_copy_(1, upload(index, device), upload(fresh, device))
        self._null.copy_(self._neutral)

    def gather(self, rows: Tensor) -> RowStates:
        """Return the values of a batch. rows: (R,) integer, row of each request in this object; 0 for padding."""
        return RowStates(*self._states.index_select(1, rows).unbind())

    def scatter(
        self, rows: Tensor, accepted: Tensor, *, prev_col: Tensor | None = None, base: Tensor | None = None
    ) -> None:
        """Store a step's accepted tokens, and first block-table column (policy SLOTS) or saved-state tokens (FOLD).

        rows: (R,) integer, as in `gather`. Others: (R,) int64 from `plan_copy` or `plan_fold`, ignored if the row is 0.
        """
        for i, new in enumerate((accepted, prev_col, base)):
            if new is not None:
                self._states[i].index_copy_(0, rows, new)
        self._null.copy_(self._neutral)
