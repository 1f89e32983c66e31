"""Which state pages a running row holds, where Mamba states outlive the step that made them.

A page holds the state of a request after a number of tokens. In column c of a row's table lies the state after at most
(c + 1) * block_size tokens: while the row runs through the block the page is its own and is overwritten; once the block
is full, the page never changes again, may be published, and the next state goes to the next column. The column of the
state after t tokens is therefore (t - 1) // block_size for everybody: steps, hits and operators.
"""

# Shape letters: R rows of a step.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba.retention import Retention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata import BlockTable, spread

_ONE = np.array(1, np.int32)


class PagePool(Protocol):
    """Pages 1 and up, by number: who holds them, and which hold a prefix that others may ask for."""

    @property
    def capacity(self) -> int:
        """Pages there are."""

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""

    def allocate(self, count: int) -> list[int]:
        """Take pages that nobody holds."""

    def hold(self, pages: Iterable[int]) -> None:
        """Take one hold more on published pages."""

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each; a published page stays where its key leads until it is needed."""

    def publish(self, page: int, key: bytes) -> bool:
        """Say what a held page contains; False if another page has that key already, and keeps it."""

    def find(self, key: bytes) -> int:
        """The page that contains `key`, 0 if none does."""

    def forget(self, page: int) -> None:
        """Drop the key of a page."""

    def clear(self) -> None:
        """Nobody holds a page, and nothing is published."""


class StatePages:
    """The page tables of all rows, and the pool they come from.

    Boundaries inside a chunk of a prompt that are to be kept get pages while there are some to spare, and are skipped
    otherwise.

    Args:
        pool: pages, of which it must have `layout.slots_per_request()` for each row.
        num_rows: rows of the request table.
        layout: columns of a request, in a mode other than NONE.
        retention: which boundaries are kept for others.
    """

    def __init__(self, pool: PagePool, num_rows: int, layout: CacheLayout, retention: Retention) -> None:
        assert layout.mode is not MambaCacheMode.NONE
        self._most = layout.slots_per_request()
        if pool.capacity < self._most * num_rows:
            raise ValueError(f"pool has {pool.capacity} pages; {num_rows} rows need {self._most * num_rows}")
        self.pool = pool
        self.layout = layout
        self.block_size = layout.block_size
        self.retention = retention
        self.blocks = BlockTable(np.zeros((num_rows, layout.columns()), dtype=np.int32))
        self.table = self.blocks.ids
        self._folds = layout.policy is StatePolicy.FOLD
        # The page that each row published last: what another request published is not a row's to drop.
        self._newest = np.zeros(num_rows, dtype=np.int64)
        self._lasting = np.array([retention.lasting(column) for column in range(layout.columns())])
        # Columns that a decode may write, from the first one on.
        self._behind = np.arange(1 + layout.num_speculative_blocks)
        # Tokens up to which a row past its prompt has the pages of every column that it may still write.
        self._covered = np.zeros(num_rows, dtype=np.int64)

    def admit(self, row: int, num_tokens: int, page: int) -> None:
        """A row starts from the state after `num_tokens` in `page`, which it holds from now on; or from nothing."""
        self._covered[row] = 0
        if num_tokens:
            self.pool.hold([page])
            self.blocks.write(row, self.layout.column(num_tokens), page)

    def covers(
        self, rows: NDArray[np.int64], computed_R: NDArray[np.int32], query_lens_R: NDArray[np.int32]
    ) -> bool:
        """Whether rows past their prompts have all pages for what the step may write, so that `cover` would add none;
        it may be unknown, and False.
        """
        reach_R = computed_R if self._folds else computed_R + query_lens_R - _ONE
        if len(self._behind) > 1:
            reach_R = reach_R + (np.minimum(query_lens_R, len(self._behind)) - 1) * self.block_size
        return not np.count_nonzero(reach_R >= self._covered[rows])

    def cover(
        self,
        rows: NDArray[np.int64],
        computed_R: NDArray[np.int32],
        query_lens_R: NDArray[np.int32],
        num_decodes: int,
        prompt_lens_R: NDArray[np.int32],
        slack_R: NDArray[np.int32] | None = None,
    ) -> None:
        """Give every row pages for what the step may write; the first `num_decodes` rows are past their prompts.

        A prompt's row that runs as a decode, one token over an existing state, writes the same column. `prompt_lens` as
        in `commit`. `slack`: `computed` is a bound, too high by so many at most; None where it is exact.
        """
        after_R = computed_R + query_lens_R
        last_R = (after_R - 1) // self.block_size
        written_R = (computed_R if self._folds else after_R - 1)[:num_decodes]
        first_R, behind, num_columns_R = (
            written_R // self.block_size,
            self._behind,
            query_lens_R[:num_decodes],
        )
        if slack_R is not None and slack_R.any():
            first_R, upper_R = (written_R - slack_R[:num_decodes]) // self.block_size, first_R
            behind = np.arange(len(behind) + int((upper_R - first_R).max(initial=0)))
            num_columns_R = np.minimum(num_columns_R, len(self._behind)) + upper_R - first_R
        columns = np.minimum(first_R[:, None] + behind, self.table.shape[1] - 1)
        missing = self.table[rows[:num_decodes, None], columns] == 0
        missing &= behind < num_columns_R[:, None]
        where, which = np.nonzero(missing)
        if len(where):
            self.blocks.write(rows[where], columns[where, which], self.pool.allocate(len(where)))
        end_R = np.minimum(first_R + np.minimum(num_columns_R, len(behind)), self.table.shape[1])
        self._covered[rows[:num_decodes]] = end_R * self.block_size
        for i in range(num_decodes, len(rows)):
            row, last = int(rows[i]), int(last_R[i])
            if not self.table[row, last]:
                kept = self.retention.published(int(computed_R[i]), int(after_R[i]), int(prompt_lens_R[i]))
                self._cover_prompt(row, last, kept)

    def _cover_prompt(self, row: int, last: int, kept: list[int]) -> None:
        """A page for the last column of a prompt's step, and for boundaries to be kept if nobody needs theirs."""
        (page,) = self.pool.allocate(1)
        self.blocks.write(row, last, page)
        # The running block has a page already if it has begun.
        missing = [column for column in kept if self.table[row, column] == 0]
        if not missing:
            return
        held_R = np.count_nonzero(self.table, axis=1)
        reserve = int(np.maximum(self._most - held_R, 0).sum())
        room = min(len(missing), self.pool.num_free - reserve)
        if room > 0:  # the latest are the likeliest to be asked for
            self.blocks.write(row, np.array(missing[-room:]), self.pool.allocate(room))

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
        self._publish(rows, before_R, after_R, prompt_lens_R, key)
        in_prompt_R = before_R < prompt_lens_R
        oldest_R = self._oldest(after_R, in_prompt_R)
        moved = (in_prompt_R | (oldest_R > self._oldest(before_R, in_prompt_R))).nonzero()[0]
        if not len(moved):
            return
        rows = rows[moved]
        held = self.table[rows]
        held *= np.arange(held.shape[1]) < oldest_R[moved, None]
        where, columns = held.nonzero()
        if len(where):
            self.pool.free(held[where, columns].tolist())
            self.blocks.write(rows[where], columns, 0)

    def _publish(
        self,
        rows: NDArray[np.int64],
        before_R: NDArray[np.int32],
        after_R: NDArray[np.int32],
        prompt_lens_R: NDArray[np.int32],
        key: Callable[[int, int], bytes],
    ) -> None:
        """What `Retention.published` and `Retention.dropped` say of a row, for all rows."""
        size, pool = self.block_size, self.pool
        first_R = before_R // size
        counts_R = after_R // size - first_R
        passed = counts_R.nonzero()[0]
        if not len(passed):
            return
        rule, ends_R = self.retention, (prompt_lens_R - 1) // size - 1
        if rule.last:  # what was the newest is so no more
            before = first_R[passed] - 1
            dropped = (before >= 0) & ~self._lasting[before]
            if rule.prompt_end:
                dropped &= before != ends_R[passed]
            for i, column in zip(passed[dropped].tolist(), before[dropped].tolist(), strict=True):
                newest = int(self._newest[rows[i]])
                if newest and newest == pool.find(key(i, (column + 1) * size)):
                    pool.forget(newest)
        which, columns = spread(passed, first_R[passed], counts_R[passed])
        kept = self._lasting[columns]
        if rule.prompt_end:
            kept |= columns == ends_R[which]
        if rule.last:
            kept |= columns == (first_R + counts_R)[which] - 1
        pages = self.table[rows[which], columns]
        kept &= pages > 0
        for i, column, page in zip(
            which[kept].tolist(), columns[kept].tolist(), pages[kept].tolist(), strict=True
        ):
            first = pool.publish(page, key(i, (column + 1) * size))
            self._newest[rows[i]] = page if first else 0

    def next_commit(
        self, computed_R: NDArray[np.int32], prompt_lens_R: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """(R,) how many computed tokens it takes until `commit` has something to do for these rows again; 0 for those
        in their prompts.
        """
        size = self.block_size
        full_R = (computed_R // size + 1) * size
        if not self._folds:  # the page before the last boundary is given up with the first state behind it
            full_R = np.minimum(full_R, np.maximum(computed_R - 1, 0) // size * size + size + 1)
        return np.where(computed_R < prompt_lens_R, 0, full_R)

    def _oldest(self, computed_R: NDArray[np.int32], in_prompt_R: NDArray[np.bool_]) -> NDArray[np.int32]:
        """The first column that a later step may read.

        That of the last state; but under FOLD a row past its prompt may not have folded since the last boundary.
        """
        last_R = np.maximum(computed_R - 1, 0) // self.block_size
        if not self._folds:
            return last_R
        boundary_R = np.maximum(computed_R // self.block_size - 1, 0)
        return np.where(in_prompt_R, last_R, boundary_R)

    def clear(self) -> None:
        """No row holds a page, and none is published."""
        self.blocks.clear_all()
        self._newest[:] = self._covered[:] = 0
        self.pool.clear()

    def release(self, row: int) -> None:
        """Give up all pages of a row."""
        held = self.table[row]
        self.pool.free(held[held > 0].tolist())
        self.blocks.clear(row)
        self._newest[row] = self._covered[row] = 0
