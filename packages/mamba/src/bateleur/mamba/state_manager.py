"""Allocates state slots to requests, and adds full blocks to the prefix cache. Used in all modes but NONE.

A Mamba block is one state slot in the block table of a request. Column c holds the state after at most
(c + 1) * block_size tokens. While the request computes the tokens of the block, the slot is overwritten. When the block
is full, the slot is never written again and may be added to the prefix cache. The state after t tokens is in column
(t - 1) // block_size. R is the number of rows (requests) of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.mamba.prefix_retention import PrefixRetention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy
from bateleur.metadata import BlockTable, expand_ranges

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class StateBlockPool(Protocol):
    """Reference-counted state slots 1, 2, ..., and the keys (prefix hashes) of those in the prefix cache."""

    @property
    def capacity(self) -> int:
        """Number of state slots."""

    @property
    def num_free(self) -> int:
        """Number of state slots that `allocate` can return now."""

    def allocate(self, count: int) -> list[int]:
        """Return `count` <= `num_free` state slots, each with one reference."""

    def hold(self, pages: Iterable[int]) -> None:
        """Add one reference to each state slot in `pages`, all of them in the prefix cache."""

    def free(self, pages: Sequence[int]) -> None:
        """Remove one reference from each state slot in `pages`. A cached slot keeps its prefix key until reused."""

    def insert(self, page: int, key: bytes) -> bool:
        """Add state slot `page` to the prefix cache by `key`. Returns False if another slot has, and keeps, the key."""

    def find(self, key: bytes) -> int:
        """Return the state slot with prefix key `key`, 0 if there is none."""

    def forget(self, page: int) -> None:
        """Remove state slot `page` from the prefix cache."""

    def clear(self) -> None:
        """Remove all references to state slots, and empty the prefix cache."""


class MambaStateManager:
    """Block tables of state slots for all running requests, over one pool.

    A prefill may pass block boundaries that `retention` keeps. They get state slots only if the pool has more free
    slots than running requests may still need. The state at the end of the step always gets a slot.

    Args:
        pool: state slots; at least `layout.slots_per_request()` for each row.
        num_rows: rows of the request table (maximum number of running requests).
        layout: block-table layout, in a mode other than NONE.
        retention: block boundaries that stay in the prefix cache.

    Raises ValueError if the pool is too small.
    """

    def __init__(self, pool: StateBlockPool, num_rows: int, layout: CacheLayout, retention: PrefixRetention) -> None:
        assert layout.mode is not MambaCacheMode.NONE
        self._max_per_row = layout.slots_per_request()
        if pool.capacity < self._max_per_row * num_rows:
            raise ValueError(f"pool has {pool.capacity} pages; {num_rows} rows need {self._max_per_row * num_rows}")
        self.pool = pool
        self.layout = layout
        self.block_size = layout.block_size
        self.retention = retention
        self.blocks = BlockTable(np.zeros((num_rows, layout.columns()), dtype=np.int32))
        self.table = self.blocks.ids
        self._spare = np.zeros_like(self.table, dtype=np.bool_)
        """Whether a slot is one that a prefill fills only for the prefix cache; no step of the request needs it."""
        self._folds = layout.policy is StatePolicy.FOLD
        # By row: the slot that it cached last, 0 if another request had cached the same prefix first.
        self._last_cached = np.zeros(num_rows, dtype=np.int64)
        self._last_key = [(-1, b"")] * num_rows
        """By row: the last column that was added to the prefix cache, and its key."""
        self._always_kept = np.array([retention.always_keeps(column) for column in range(layout.columns())])
        self._max_blocks_per_decode = 1 + layout.num_speculative_blocks
        # By row past its prompt: all columns that it may write up to this number of tokens have slots.
        self._allocated_tokens = np.zeros(num_rows, dtype=np.int64)
        # By row: number of computed tokens at which `commit` next has work; 0 inside a prompt.
        self._next_commit = np.zeros(num_rows, dtype=np.int64)

    def admit(self, row: int, num_tokens: int, page: int) -> None:
        """Start a request in `row` from the cached state after `num_tokens` tokens, in slot `page`. No hit: both 0."""
        self._allocated_tokens[row] = self._next_commit[row] = 0
        if num_tokens:
            self.pool.hold([page])
            self.blocks.write(row, self.layout.column(num_tokens), page)

    def allocate_blocks(
        self, rows: Longs, computed_R: Ints, query_lens_R: Ints, num_decodes: int, prompt_lens_R: Ints,
        uncertain_R: Ints | None = None,
    ) -> None:  # fmt: skip
        """Allocate a state slot for every block-table column that the step may write.

        Args:
            rows: (R,) rows of the requests in the request table.
            computed_R: (R,) tokens before the step, or an upper bound.
            query_lens_R: (R,) tokens of the step.
            num_decodes: number of leading rows past their prompts.
            prompt_lens_R: (R,) tokens that each request was admitted with.
            uncertain_R: (R,) tokens by which `computed_R` may be too high; None if it is exact.
        """
        n = num_decodes
        uncertain_R = None if uncertain_R is None else uncertain_R[:n]
        cells = self._missing_cells(rows[:n], computed_R[:n], query_lens_R[:n], uncertain_R)
        if len(cells):
            self.blocks.write_cells(cells, self.pool.allocate(len(cells)))
        for i in range(num_decodes, len(rows)):
            row, computed, after = int(rows[i]), int(computed_R[i]), int(computed_R[i] + query_lens_R[i])
            if not self.table[row, last := (after - 1) // self.block_size]:
                kept = self.retention.columns_to_cache(computed, after, int(prompt_lens_R[i]))
                self._allocate_prefill(row, last, kept)

    def _missing_cells(self, rows: Longs, computed_R: Ints, query_lens_R: Ints, uncertain_R: Ints | None) -> Longs:
        """Return flat block-table indices that decodes may write and that have no slot; mark them allocated."""
        num_columns_R = np.minimum(query_lens_R, self._max_blocks_per_decode)
        written_R = computed_R if self._folds else computed_R + query_lens_R - 1
        if (written_R + (num_columns_R - 1) * self.block_size < self._allocated_tokens[rows]).all():
            return rows[:0]
        first_R = (written_R if uncertain_R is None else written_R - uncertain_R) // self.block_size
        end_R = np.minimum(written_R // self.block_size + num_columns_R, self.table.shape[1])
        which, columns = expand_ranges(np.arange(len(rows)), first_R, end_R - first_R)
        self._allocated_tokens[rows] = end_R * self.block_size
        missing = self.table[rows[which], columns] == 0
        cells: Longs = rows[which[missing]] * self.table.shape[1] + columns[missing]
        return cells

    def _allocate_prefill(self, row: int, last: int, kept: list[int]) -> None:
        """Allocate slots for a prefill's last column, and for the columns `kept` if the pool has slots to spare."""
        (page,) = self.pool.allocate(1)
        self.blocks.write(row, last, page)
        # The running block has a slot already if an earlier step wrote to it.
        missing = [column for column in kept if self.table[row, column] == 0]
        if not missing:
            return
        held = self.table > 0
        if self.layout.steps_ahead:  # the next step is planned before `commit` frees the spare slots of this one
            held &= ~self._spare
        held_R = np.count_nonzero(held, axis=1)
        reserve = int(np.maximum(self._max_per_row - held_R, 0).sum())
        room = min(len(missing), self.pool.num_free - reserve)
        if room > 0:  # later boundaries are more likely to be hit
            columns = np.array(missing[-room:])
            self.blocks.write(row, columns, self.pool.allocate(room))
            self._spare[row, columns] = True

    def commit(
        self, rows: Longs, before_R: Ints, after_R: Ints, prompt_lens_R: Ints, key: Callable[[int, int], bytes]
    ) -> None:
        """After a step: cache full blocks, drop those that `retention` no longer keeps, free slots not read again.

        Args:
            rows: (R,) rows of the requests in the request table.
            before_R, after_R: (R,) tokens before and after the step.
            prompt_lens_R: (R,) tokens that each request was admitted with.
            key: key(i, num_tokens) is the prefix key of the first `num_tokens` tokens of the i-th request of the step.
        """
        pool, size = self.pool, self.block_size
        index = (after_R >= self._next_commit[rows]).nonzero()[0]
        if not len(index):
            return
        rows, before_R, after_R, prompt_lens_R = rows[index], before_R[index], after_R[index], prompt_lens_R[index]
        dropped, cached, freed = self._changes(rows, before_R, after_R, prompt_lens_R)
        self._next_commit[rows] = self._next_change(after_R, prompt_lens_R)
        for _, row, column, page in dropped:
            last, name = self._last_key[row]
            if last == column and page == pool.find(name):
                pool.forget(page)
        for i, row, column, page in cached:
            name = key(int(index[i]), (column + 1) * size)
            self._last_cached[row] = page if pool.insert(page, name) else 0
            self._last_key[row] = column, name
        if len(freed):
            pool.free(self.table.reshape(-1)[freed].tolist())
            self.blocks.write_cells(freed, 0)
            self._spare.reshape(-1)[freed] = False

    def _changes(
        self, rows: Longs, before_R: Ints, after_R: Ints, prompt_lens_R: Ints
    ) -> tuple[list[list[int]], list[list[int]], Longs]:
        """Return the blocks that `commit` drops from and adds to the prefix cache, and the blocks no later step reads.

        The first two are (index in `rows`, row, column, slot), the last are cells of the flattened block table.
        """
        size, rule = self.block_size, self.retention
        first_R, ends_R = before_R // size, (prompt_lens_R - 1) // size - 1
        counts_R = after_R // size - first_R
        passed = counts_R.nonzero()[0]
        before = first_R[passed] - 1
        newest = self._last_cached[rows[passed]]
        drop = (before >= 0) & ~self._always_kept[before] & (newest > 0) & rule.last
        which, columns = expand_ranges(passed, first_R[passed], counts_R[passed])
        insert = self._always_kept[columns]
        if rule.prompt_end:
            drop &= before != ends_R[passed]
            insert |= columns == ends_R[which]
        if rule.last:
            insert |= columns == (first_R + counts_R)[which] - 1
        pages = self.table[rows[which], columns]
        insert &= pages > 0
        dropped = np.stack((passed, rows[passed], before, newest), 1)[drop].tolist()
        cached = np.stack((which, rows[which], columns, pages), 1)[insert].tolist()
        in_prompt_R = before_R < prompt_lens_R
        oldest_R = self._oldest(after_R, in_prompt_R)
        moved = (in_prompt_R | (oldest_R > self._oldest(before_R, in_prompt_R))).nonzero()[0]
        held = self.table[rows[moved]] * (np.arange(self.table.shape[1]) < oldest_R[moved, None])
        where, columns = held.nonzero()
        freed = rows[moved[where]] * self.table.shape[1] + columns
        return dropped, cached, freed

    def _next_change(self, computed_R: Ints, prompt_lens_R: Ints) -> Longs:
        """Return the tokens (R,) at which `commit` next caches or frees blocks of a request; 0 inside a prompt."""
        size = self.block_size
        full_R = (computed_R // size + 1) * size
        if not self._folds:  # the first state of a block frees the slot of the block before
            full_R = np.minimum(full_R, np.maximum(computed_R - 1, 0) // size * size + size + 1)
        return np.where(computed_R < prompt_lens_R, 0, full_R)

    def _oldest(self, computed_R: Ints, in_prompt_R: NDArray[np.bool_]) -> Ints:
        """Return the first block-table column (R,) that a later step may read.

        Usually the column of the last state. With the state policy FOLD, the saved state of a request past its prompt
        may still be in the column of the last boundary.
        """
        last_R = np.maximum(computed_R - 1, 0) // self.block_size
        if not self._folds:
            return last_R
        boundary_R = np.maximum(computed_R // self.block_size - 1, 0)
        return np.where(in_prompt_R, last_R, boundary_R)

    def clear(self) -> None:
        """Free all state slots and empty the prefix cache."""
        self.blocks.clear_all()
        self._last_cached[:] = self._allocated_tokens[:] = self._next_commit[:] = 0
        self._spare[:] = False
        self.pool.clear()

    def release(self, row: int) -> None:
        """Free all state slots of the request in `row`."""
        held = self.table[row]
        self.pool.free(held[held > 0].tolist())
        self.blocks.clear(row)
        self._last_cached[row] = self._allocated_tokens[row] = self._next_commit[row] = 0
        self._spare[row] = False
