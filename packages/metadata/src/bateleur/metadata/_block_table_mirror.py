"""Tracks which requests are in the batch, and which of their block ids the staged block tables lack."""

from collections.abc import Sequence

import numpy as np

from bateleur.metadata.block_table import BlockTable
from bateleur.metadata.seq_len_bound import BoolArray, I32Array, IntArray


class BlockTableMirror:
    """Compares the staged block tables of all KV-cache groups with the :class:`BlockTable` objects.

    For each of the M rows of a block table, one per running request, it has the batch row, -1 if not in the batch.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.num_rows = len(tables[0].ids) if tables else 0
        self._iota: IntArray = np.arange(self.num_rows, dtype=np.int64)
        self.forget_batch()

    def forget_batch(self) -> None:
        """Forget which requests are in the batch, because other tables were staged."""
        self._batch_row_of: IntArray = np.full(self.num_rows, -1, np.int64)
        self._rows: IntArray = self._iota[:0]
        self._rows_bytes = b""
        self._num_clears = -1

    def forget_all(self) -> None:
        """Forget the staged tables, on the device as well: the next step stages all rows again."""
        self.forget_batch()
        for table in self.tables:
            table.mark_all_unstaged()

    def none_cleared(self) -> bool:
        """Return whether no row of a block table was cleared since the last :meth:`place_rows`."""
        num_clears = 0
        for table in self.tables:
            num_clears += table.num_clears
        return num_clears == self._num_clears

    def unchanged(self) -> bool:
        """Return whether the staged tables are up to date for the requests of the last :meth:`place_rows`."""
        num_clears = 0
        for table in self.tables:
            if not table.has_no_writes:
                return False
            num_clears += table.num_clears
        return num_clears == self._num_clears

    def place_rows(self, rows: IntArray) -> BoolArray | None:
        """Assign requests, given by their rows (R,) in the block tables, to batch rows 0 to R - 1.

        Returns (R,) bool, True for batch rows that hold another request's block ids; None if none does.
        """
        num_clears = sum(table.num_clears for table in self.tables)
        rows_bytes = rows.tobytes()
        if rows_bytes == self._rows_bytes and num_clears == self._num_clears:
            return None
        moved: BoolArray = np.ones(len(rows), np.bool_)
        both = min(len(rows), len(self._rows))
        np.not_equal(rows[:both], self._rows[:both], out=moved[:both])
        for table in self.tables:
            moved |= table.cleared[rows]
        self._batch_row_of[self._rows] = -1
        self._batch_row_of[rows] = self._iota[: len(rows)]
        self._rows, self._rows_bytes, self._num_clears = rows.copy(), rows_bytes, num_clears
        return moved

    def take_writes(self, index: int, moved: bool) -> tuple[IntArray, IntArray, I32Array] | None:
        """Take the block ids written to table ``index`` since it was staged, see :meth:`BlockTable.take_writes`."""
        return self.tables[index].take_writes(self._batch_row_of, moved)

    def copy_writes(self, index: int, moved: bool, out: I32Array) -> None:
        """Copy the block ids written to table ``index`` since it was staged, see :meth:`BlockTable.copy_writes`."""
        self.tables[index].copy_writes(self._batch_row_of, moved, out)
