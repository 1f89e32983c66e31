"""What is to be computed next for every running request: a certain token, and drafts behind it."""

# Shape letters: M rows of the request table, R rows of a step, J = 1 + K for K drafts at most.

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Span(NamedTuple):
    """What comes next of rows that lie one behind the other: the memory itself."""

    tokens: Tensor
    """(R,) int64"""
    drafts: Tensor
    """(R, K) int64"""


class NextTokens:
    """By row of the request table, on the device.

    ids: (1 + M, J) int64, the token that was drawn last, then drafts, -1 where there is none. The last row takes what
    belongs to no request.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        """Of a request table of `max_rows` rows; `width` is J. Nothing is to be computed yet."""
        self.ids = torch.zeros((1 + max_rows, width), dtype=torch.int64, device=device)

    @cached_property
    def on_host(self) -> NDArray[np.int64]:
        """`ids` as numpy sees them, the same memory; on a CPU."""
        found: NDArray[np.int64] = self.ids.numpy()
        return found

    @cached_property
    def _parts_on_host(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The certain tokens, and the drafts: numpy indexes rows of these in half of the time."""
        return self.on_host[:, 0], self.on_host[:, 1:]

    def of(self, rows: Tensor) -> Tensor:
        """(R,) int64: the certain token of each of `rows` (R,) int64."""
        return self.ids[:, 0].index_select(0, rows)

    def drafts_of(self, rows: Tensor) -> Tensor:
        """(R, K) int64: what was proposed for them."""
        return self.ids[:, 1:].index_select(0, rows)

    def span_of(self, rows: NDArray[np.int64]) -> Span | None:
        """Of `rows`, if they lie one behind the other."""
        first, count = int(rows[0]), len(rows)
        if not np.array_equal(rows, np.arange(first, first + count)):
            return None
        here = self.ids[first : first + count]
        return Span(here[:, 0], here[:, 1:])

    def emitted(self, rows: Tensor, tokens: Tensor, num_emitted: Tensor) -> None:
        """The last of the tokens (R, J) of each row, `num_emitted` (R,) int64, comes next. Fit for capture."""
        last_R1 = (num_emitted - 1).clamp_min_(0).unsqueeze(1)
        last_R = tokens.gather(1, last_R1).squeeze(1).clamp_min_(0)
        self.ids[:, 0].index_copy_(0, rows, last_R)

    def drew(self, rows: Tensor, tokens: Tensor) -> None:
        """`emitted` of rows that had no drafts and drew `tokens` (R,) int64 each, 0 in a bad row. Fit for capture."""
        self.ids[:, 0].index_copy_(0, rows, tokens)

    def keep(self, rows: Tensor, tokens: Tensor, drafts: Tensor) -> None:
        """The tokens (R,) of each row, and the drafts (R, K) behind them, come next. Fit for capture."""
        self.ids.index_copy_(0, rows, torch.cat((tokens.unsqueeze(1), drafts), 1))

    def emitted_on_host(self, rows: NDArray[np.int64], tokens: Tensor, num_emitted: Tensor) -> None:
        """`emitted` on a CPU, in half of the time of torch's operators."""
        found: NDArray[np.int64] = tokens.numpy()
        if found.shape[1] == 1:
            last_R = found[:, 0]
        else:
            last_R = found[np.arange(len(found)), np.maximum(num_emitted.numpy() - 1, 0)]
        self._parts_on_host[0][rows] = np.maximum(last_R, 0)

    def of_on_host(self, rows: NDArray[np.int64]) -> Tensor:
        """`of` on a CPU."""
        return torch.from_numpy(self._parts_on_host[0][rows])

    def keep_on_host(self, rows: NDArray[np.int64], tokens: Tensor | None, drafts: Tensor) -> None:
        """`keep` on a CPU; `tokens` is None where the rows have theirs."""
        certain, drafted = self._parts_on_host
        if tokens is not None:
            certain[rows] = tokens.numpy()
        drafted[rows] = drafts.numpy()
