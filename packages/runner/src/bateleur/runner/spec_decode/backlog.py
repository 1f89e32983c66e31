"""What a draft head has not seen, because nobody wanted its drafts: it is shown when somebody does.

A step without drafts then costs nothing for the head but that what it would be fed is kept, by reference: outputs of
eager steps are nobody else's memory.
"""

# Shape letters: R rows of a step, T tokens, N rows of the request table.

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import StepRows
from bateleur.runner.requests.request_table import RequestTable

_MAX_BYTES = 64 << 20


class _Step(NamedTuple):
    """A step that the head has not seen."""

    number: int
    rows: NDArray[np.int64]
    """(R,) of the request table."""
    first: NDArray[np.int32]
    """(R,) position of the first token of each."""
    query_lens: NDArray[np.int32]
    """(R,) tokens of each, which have features."""
    num_valid: NDArray[np.int64]
    """(R,) tokens of each that stay."""
    features: tuple[Tensor, ...]
    num_bytes: int


class Backlog:
    """The newest steps without drafts, as far as 64 MiB of features hold them.

    Of a request of which something was forgotten, or that was not watched for a while, the head knows what is behind
    that: it begins there anew, or if it can't, the request gets no drafts any more.
    """

    def __init__(self, table: RequestTable, *, begins_late: bool, max_bytes: int = _MAX_BYTES) -> None:
        """begins_late: see `EagleSpeculator`."""
        self._table, self._begins_late, self._max_bytes = table, begins_late, max_bytes
        self._steps: deque[_Step] = deque()
        self._num_steps = self._num_bytes = 0
        self._since = np.zeros(len(table.num_tokens), np.int64)
        """(N,) number of the first step that may be missing."""
        self._shown = np.zeros(len(table.num_tokens), np.int32)
        """(N,) tokens of the request that had been shown by then."""
        self._begins = np.zeros(len(table.num_tokens), np.int64)
        """(N,) position of the first token behind what was forgotten."""
        self._any_begins = False
        """Whether any is not 0."""
        self._caught_up: tuple[NDArray[np.int64] | None, int] = (None, 0)
        """Rows that missed nothing when there were so many steps."""

    def admit(self, row: int) -> None:
        """A request begins in row `row`."""
        self._since[row], self._begins[row] = self._num_steps, 0
        self._shown[row] = self._table.num_computed[row]
        self._any_begins = self._any_begins and bool(self._begins.any())
        self._forget_seen()

    def restart(self) -> None:
        """Steps that ran since the last one were not kept: of all rows begin anew, with the step that runs now."""
        self._steps.clear()
        self._num_bytes = 0
        self._since[:] = self._num_steps
        self._shown[:] = self._begins[:] = self._table.num_computed
        self._any_begins = True

    def begins(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(R,) position of the first token of these rows that the head knows, or None for 0."""
        if not self._any_begins:
            return None
        begins = self._begins[rows]
        return begins if begins.any() else None

    @property
    def loses(self) -> bool:
        """Whether there may be such rows."""
        return not self._begins_late

    def is_lost(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(R,) whether these rows get no drafts any more."""
        return (self._begins[rows] > 0) & (not self._begins_late)

    def num_missed(self, rows: NDArray[np.int64]) -> int:
        """Tokens of these rows (R,) that the head has not seen, before the step that runs now."""
        missing = self._since[rows] < self._num_steps
        if not np.count_nonzero(missing):
            return 0
        return int(((self._table.num_computed[rows] - self._shown[rows]) * missing).sum())

    def add(
        self,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int32],
        num_valid: NDArray[np.int64],
        features: tuple[Tensor, ...],
    ) -> None:
        """Keep a step of these rows (R,), which stands behind what the table says that they have computed."""
        first, size = self._table.num_computed[rows], sum([each.nbytes for each in features])
        if not self._steps:
            self._shown[rows] = first
        step = _Step(self._num_steps, rows, first, query_lens, num_valid, features, size)
        self._num_steps += 1
        self._num_bytes += size
        self._steps.append(step)
        while self._num_bytes > self._max_bytes:
            oldest = self._steps.popleft()
            self._num_bytes -= oldest.num_bytes
            missed = self._since[oldest.rows] <= oldest.number
            rows, end = oldest.rows[missed], (oldest.first + oldest.num_valid)[missed]
            self._begins[rows] = self._shown[rows] = end
            self._any_begins = True

    def take(self, rows: NDArray[np.int64]) -> tuple[StepRows, tuple[Tensor, ...]] | None:
        """What the head misses of these rows (R,) of the table, before the step that runs now, as one step of prompts,
        each token with the id of the one behind it; and what it is fed, (T, width) each. None if it misses nothing.

        They are caught up from here on.
        """
        if self._caught_up[0] is rows and self._caught_up[1] == self._num_steps:
            return None
        self._caught_up = rows, self._num_steps
        if not np.count_nonzero(self._since[rows] < self._num_steps):
            return None
        wanted = np.zeros(len(self._since), np.bool_)
        wanted[rows] = ~self.is_lost(rows)
        row_T, position_T, index_T, features = [], [], [], []
        num_tokens = 0
        for step in self._steps:
            there = np.flatnonzero(wanted[step.rows] & (self._since[step.rows] <= step.number))
            if not len(there):
                continue
            lens = step.num_valid[there]
            starts = np.cumsum(step.query_lens, dtype=np.int64) - step.query_lens
            within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
            row_T.append(np.repeat(step.rows[there], lens))
            position_T.append(np.repeat(step.first[there], lens) + within)
            index_T.append(np.repeat(starts[there], lens) + within + num_tokens)
            features.append(step.features)
            num_tokens += len(step.features[0])
        self._since[rows], self._shown[rows] = self._num_steps, self._table.num_computed[rows]
        self._forget_seen()
        if not features:
            return None
        row, position = np.concatenate(row_T), np.concatenate(position_T)
        order = np.lexsort((position, row))
        row, position = row[order], position[order]
        index = torch.from_numpy(np.concatenate(index_T)[order])
        found = tuple(torch.cat(each).index_select(0, index) for each in zip(*features, strict=True))
        missing, first, lens = np.unique(row, return_index=True, return_counts=True)
        rows_of_prompts = StepRows(
            query_lens=lens.astype(np.int32),
            num_computed=position[first].astype(np.int32),
            is_prefilling=np.ones(len(missing), np.bool_),
            token_ids=self._table.token_ids[row, position + 1].astype(np.int32),
            block_tables=(self._table.block_table[missing],),
        )
        return rows_of_prompts, found

    def _forget_seen(self) -> None:
        """Drop the oldest steps that nobody misses."""
        while self._steps and not (self._since[self._steps[0].rows] <= self._steps[0].number).any():
            self._num_bytes -= self._steps.popleft().num_bytes
