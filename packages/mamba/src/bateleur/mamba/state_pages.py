"""Which state pages a running row holds, where Mamba states outlive the step that made them.

A page holds the state of a request after a number of tokens. In column c of a row's table lies the state after at most
(c + 1) * block_size tokens: while the row runs through the block the page is its own and is overwritten; once the block
is full, the page never changes again, may be published, and the next state goes to the next column. The column of the
state after t tokens is therefore (t - 1) // block_size for everybody: steps, hits and operators.
"""

# Shape letters: R rows of a step.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba.retention import Retention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata import BlockTable, expand_ranges

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


class _Turned(NamedTuple):
    """What a step did to pages of its R rows: (index in the step, row, column, page) each of those that were published
    and need not be found any longer, and of those that are now; and cells of the flat table that are given up.
    """

    dropped: list[list[int]]
    kept: list[list[int]]
    left: NDArray[np.int64]


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
        self._newest_key = [(-1, b"")] * num_rows
        """Its column, and what it was published as."""
        self._lasting = np.array([retention.lasting(column) for column in range(layout.columns())])
        # Columns that a decode may write, from the first one on.
        self._behind = np.arange(1 + layout.num_speculative_blocks)
        # Tokens up to which a row past its prompt has the pages of every column that it may still write.
        self._covered = np.zeros(num_rows, dtype=np.int64)
        # By row, how many computed tokens it takes until `commit` has something to do; 0 in prompts.
        self._due = np.zeros(num_rows, np.int64)

    def admit(self, row: int, num_tokens: int, page: int) -> None:
        """A row starts from the state after `num_tokens` in `page`, which it holds from now on; or from nothing."""
        self._covered[row] = self._due[row] = 0
        if num_tokens:
            self.pool.hold([page])
            self.blocks.write(row, self.layout.column(num_tokens), page)

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
        cells = self._missing(rows, computed_R, query_lens_R, num_decodes, slack_R)
        if len(cells):
            self.blocks.write_cells(cells, self.pool.allocate(len(cells)))
        for i in range(num_decodes, len(rows)):
            row, computed, after = int(rows[i]), int(computed_R[i]), int(computed_R[i] + query_lens_R[i])
            if not self.table[row, last := (after - 1) // self.block_size]:
                kept = self.retention.published(computed, after, int(prompt_lens_R[i]))
                self._cover_prompt(row, last, kept)

    def _missing(
        self,
        rows: NDArray[np.int64],
        computed_R: NDArray[np.int32],
        query_lens_R: NDArray[np.int32],
        num_decodes: int,
        slack_R: NDArray[np.int32] | None,
    ) -> NDArray[np.int64]:
        """Cells of the flat table that the first `num_decodes` rows may write and that have no page; they have from
        here on."""
        rows, num_columns_R = rows[:num_decodes], np.minimum(query_lens_R[:num_decodes], len(self._behind))
        written_R = computed_R[:num_decodes]
        if not self._folds:
            written_R = written_R + query_lens_R[:num_decodes] - _ONE
        if not (written_R + (num_columns_R - 1) * self.block_size >= self._covered[rows]).any():
            return rows[:0]
        first_R = upper_R = written_R // self.block_size
        if slack_R is not None:
            first_R = (written_R - slack_R[:num_decodes]) // self.block_size
        end_R = np.minimum(upper_R + num_columns_R, self.table.shape[1])
        which, columns = expand_ranges(np.arange(len(rows)), first_R, end_R - first_R)
        self._covered[rows] = end_R * self.block_size
        missing = self.table[rows[which], columns] == 0
        cells: NDArray[np.int64] = rows[which[missing]] * self.table.shape[1] + columns[missing]
        return cells

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

        `key(i, num_tokens)` names the first tokens of the i-th row of the step, which are more than `before`;
        prompt_lens (R,) are the tokens that the rows were admitted with.
        """
        pool, size = self.pool, self.block_size
        index = (after_R >= self._due[rows]).nonzero()[0]
        turned = self._turned(index, rows[index], before_R[index], after_R[index], prompt_lens_R[index])
        for _, row, column, page in turned.dropped:
            last, name = self._newest_key[row]
            if last == column and page == pool.find(name):
                pool.forget(page)
        for i, row, column, page in turned.kept:
            name = key(i, (column + 1) * size)
            self._newest[row] = page if pool.publish(page, name) else 0
            self._newest_key[row] = column, name
        if len(turned.left):
            pool.free(self.table.reshape(-1)[turned.left].tolist())
            self.blocks.write_cells(turned.left, 0)

    def _turned(
        self,
        index: NDArray[np.int64],
        rows: NDArray[np.int64],
        before_R: NDArray[np.int32],
        after_R: NDArray[np.int32],
        prompt_lens_R: NDArray[np.int32],
    ) -> _Turned:
        """What `commit` does with rows that have this `index` in the step: the rule of `Retention`, for all rows."""
        size, rule = self.block_size, self.retention
        first_R, ends_R = before_R // size, (prompt_lens_R - 1) // size - 1
        counts_R = after_R // size - first_R
        passed = counts_R.nonzero()[0]
        before = first_R[passed] - 1
        newest = self._newest[rows[passed]]
        gone = (before >= 0) & ~self._lasting[before] & (newest > 0) & rule.last  # the newest is so no more
        which, columns = expand_ranges(passed, first_R[passed], counts_R[passed])
        stays = self._lasting[columns]
        if rule.prompt_end:
            gone &= before != ends_R[passed]
            stays |= columns == ends_R[which]
        if rule.last:
            stays |= columns == (first_R + counts_R)[which] - 1
        pages = self.table[rows[which], columns]
        stays &= pages > 0
        dropped = np.stack((index[passed], rows[passed], before, newest), 1)[gone].tolist()
        kept = np.stack((index[which], rows[which], columns, pages), 1)[stays].tolist()
        in_prompt_R = before_R < prompt_lens_R
        oldest_R = self._oldest(after_R, in_prompt_R)
        moved = (in_prompt_R | (oldest_R > self._oldest(before_R, in_prompt_R))).nonzero()[0]
        held = self.table[rows[moved]] * (np.arange(self.table.shape[1]) < oldest_R[moved, None])
        where, columns = held.nonzero()
        left = rows[moved[where]] * self.table.shape[1] + columns
        self._due[rows] = self._next_turn(after_R, prompt_lens_R)
        return _Turned(dropped, kept, left)

    def _next_turn(
        self, computed_R: NDArray[np.int32], prompt_lens_R: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """(R,) how many computed tokens it takes until `commit` has something to do; 0 in prompts."""
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
        self._newest[:] = self._covered[:] = self._due[:] = 0
        self.pool.clear()

    def release(self, row: int) -> None:
        """Give up all pages of a row."""
        held = self.table[row]
        self.pool.free(held[held > 0].tolist())
        self.blocks.clear(row)
        self._newest[row] = self._covered[row] = self._due[row] = 0
