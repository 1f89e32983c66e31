"""What a running request carries from step to step, on the device."""

from __future__ import annotations

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
    """The states of the rows of one batch, each (R,) int64."""

    accepted: Tensor
    """Tokens that survived of the request's previous step, in [1, 1 + K]; 1 where there was none."""
    prev_col: Tensor
    """Column that the previous step wrote from, under SLOTS; -1 where there was none."""
    base: Tensor
    """Tokens in the checkpoint, under FOLD."""


class RequestStates:
    """Accepted counts, anchors and ring cursors of all running requests of a Mamba group, by request row.

    They belong to the request and not to its place in a batch: a batch names its requests, `gather` fetches their
    states in batch order, and `scatter` puts the new ones back. Row 0 is null: padded rows name it, and it is always
    neutral. Groups with different layouts have states of their own. All lie in one tensor, whose address never
    changes.

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
        """Rows, the null row included."""
        return self._states.shape[1]

    @property
    def address(self) -> int:
        """Where the states lie, for a book of addresses that a graph baked."""
        return self._states.data_ptr()

    @property
    def values(self) -> Tensor:
        """(3, num_rows) int64: accepted, prev_col and base of every row, as they are now."""
        return self._states

    def admit(self, rows: OnHost, computed: OnHost | int = 0) -> None:
        """Forget what the rows held: requests begin in them, with `computed` tokens of a prefix hit each (0 for none).

        A request that resumes after a preemption begins again, too. One that ends leaves its row as it is.
        """
        if self._states.device.type == "cpu":  # a tenth of the time of torch's operators
            states = self._states.numpy()
            states[:, np.asarray(rows)] = np.array(self._NEUTRAL)[:, None]
            states[2, np.asarray(rows)] = np.asarray(computed)
            states[:, 0] = self._NEUTRAL
            return
        index = np.array(rows, np.int64)
        fresh = np.array(self._NEUTRAL)[:, None].repeat(len(index), 1)
        fresh[2] = np.asarray(computed)
        device = self._states.device
        self._states.index_copy_(1, upload(index, device), upload(fresh, device))
        self._null.copy_(self._neutral)

    def gather(self, rows: Tensor) -> RowStates:
        """The states of a batch: rows (R,) integer, 0 in padded rows."""
        return RowStates(*self._states.index_select(1, rows).unbind())

    def scatter(
        self, rows: Tensor, accepted: Tensor, *, prev_col: Tensor | None = None, base: Tensor | None = None
    ) -> None:
        """Keep what a plan says after a step: accepted and prev_col of `plan_copy`, accepted and base of `plan_fold`.

        rows (R,) integer as in `gather`; the others (R,) int64, whatever they hold in padded rows.
        """
        for i, new in enumerate((accepted, prev_col, base)):
            if new is not None:
                self._states[i].index_copy_(0, rows, new)
        self._null.copy_(self._neutral)
