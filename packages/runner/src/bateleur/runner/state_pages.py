"""Which state pages a running row holds, where Mamba states outlive the step that made them.

A page holds the state of a request after a number of tokens. In column c of a row's table lies the state after at most
(c + 1) * block_size tokens: while the row runs through the block the page is its own and is overwritten; once the block
is full, the page never changes again, may be published, and the next state goes to the next column. The column of the
state after t tokens is therefore (t - 1) // block_size for everybody: steps, hits and operators.
"""

# Shape letters: R rows of a step.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba import Retention
from bateleur.runner.block_pool import BlockPool


class StatePages:
    """The page tables of all rows, and the pool they come from.

    A row needs two pages at most: the one it reads, and the next where its block ends within the step. Further
    boundaries inside a chunk of a prompt get pages while there are some to spare, and are skipped otherwise.

    Args:
        pool: pages, of which it must have two for each row.
        num_rows: rows of the request table.
        columns: blocks of the longest request.
        retention: which boundaries are kept for others.
    """

    def __init__(self, pool: BlockPool, num_rows: int, columns: int, retention: Retention) -> None:
        if pool.capacity < 2 * num_rows:
            raise ValueError(f"pool has {pool.capacity} pages; {num_rows} rows need {2 * num_rows}")
        self.pool = pool
        self.block_size = retention.block_size
        self.retention = retention
        self.table = np.zeros((num_rows, columns), dtype=np.int32)

    def admit(self, row: int, num_tokens: int, page: int) -> None:
        """A row starts from the state after `num_tokens` in `page`, which it holds from now on; or from nothing."""
        if num_tokens:
            self.pool.hold([page])
            self.table[row, self._column(num_tokens)] = page

    def cover(
        self, rows: NDArray[np.int64], computed_R: NDArray[np.int32], query_lens_R: NDArray[np.int32]
    ) -> None:
        """Give every row a page for its state after the step, and for boundaries on the way."""
        last_R = (computed_R + query_lens_R - 1) // self.block_size
        for i in np.flatnonzero(self.table[rows, last_R] == 0):
            row: int = int(rows[i])
            last = int(last_R[i])
            (self.table[row, last],) = self.pool.allocate(1)
            # The first block that this step fills: the running one if it has begun, which has a page then.
            first = int(computed_R[i]) // self.block_size
            missing = [c for c in range(first, last) if self.table[row, c] == 0]
            reserve = 2 * len(self.table) - np.count_nonzero(self.table)
            room = min(len(missing), max(0, self.pool.num_free - int(reserve)))
            if room:  # the latest are the likeliest to be asked for
                self.table[row, missing[-room:]] = self.pool.allocate(room)

    def commit(
        self,
        rows: NDArray[np.int64],
        before_R: NDArray[np.int32],
        after_R: NDArray[np.int32],
        prompt_lens_R: NDArray[np.int32],
        key: Callable[[int, int], bytes],
    ) -> None:
        """The step ran: publish what it filled, forget what is no longer kept, give up pages that it left behind.

        `key(i, num_tokens)` names the first tokens of the i-th row of the step; prompt_lens (R,) are the tokens that
        the rows were admitted with.
        """
        size = self.block_size
        for i in np.flatnonzero(before_R // size != after_R // size).tolist():
            span = (int(before_R[i]), int(after_R[i]), int(prompt_lens_R[i]))
            for column in self.retention.published(*span):
                if page := int(self.table[rows[i], column]):
                    self.pool.publish(page, key(i, (column + 1) * size))
            for column in self.retention.dropped(*span):
                if page := self.pool.find(key(i, (column + 1) * size)):
                    self.pool.forget(page)
        passed_R = (after_R - 1) // size
        for i in np.flatnonzero(passed_R > np.maximum(before_R - 1, 0) // size).tolist():
            left = self.table[rows[i], : passed_R[i]]
            self.pool.free(left[left > 0].tolist())
            left[:] = 0

    def release(self, row: int) -> None:
        """Give up all pages of a row."""
        held = self.table[row]
        self.pool.free(held[held > 0].tolist())
        held[:] = 0

    def _column(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.block_size
