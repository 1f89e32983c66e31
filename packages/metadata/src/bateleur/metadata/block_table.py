"""Block tables of requests that stay for many steps: what their owner writes, and what of it a stager does not know."""

import numpy as np
import numpy.typing as npt

from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import BoolArray, I32Array, IntArray


class BlockTable:
    """The block ids of every request row of one KV-cache group, in host memory, and the log of what was written.

    An engine keeps one for each group and hands them to :class:`InputBuffers`; a step then names rows, and only cells
    that were written since the row was last staged travel. One table belongs to one stager. The owner reads ``ids``,
    and writes through the methods; what lies behind a row's own blocks must be null.

    Attributes:
        ids: (M, max_blocks) int32, by request row.
        width: leading columns that may hold an id, as of the last :meth:`take`; only :meth:`mark_all_unstaged` makes
        it less.
        fresh: (M,) bool, rows that were cleared and not staged since.
        version: counts the rows that were cleared.
        num_writes: counts the calls of :meth:`write`.
    """

    def __init__(self, ids: I32Array) -> None:
        """Own ``ids``; nobody knows its contents yet.

        Raises:
            ValueError: ``ids`` is not a contiguous (M, max_blocks) int32 array.
        """
        if ids.ndim != 2 or ids.dtype != np.int32 or not ids.flags.c_contiguous:
            raise ValueError(
                f"ids: has shape {ids.shape} and dtype {ids.dtype}, must be contiguous, (rows, max_blocks) int32"
            )
        self.ids = ids
        self.num_clears = self.num_writes = 0
        self._flat = ids.reshape(-1)
        self._columns = ids.shape[1]
        self.mark_all_unstaged()

    def write(self, rows: IntArray | int, columns: IntArray | int, ids: npt.ArrayLike) -> None:
        """Set the cells (``rows``, ``columns``), which are broadcast against each other."""
        cells: npt.NDArray[np.int64] = np.asarray(rows, np.int64) * self._columns + columns
        self.write_cells(cells, ids)

    def write_cells(self, cells: npt.NDArray[np.int64], ids: npt.ArrayLike) -> None:
        """The same of entries (n,) of ``ids`` seen as one row; nobody writes to ``cells`` any more."""
        self.num_writes += 1
        self._flat[cells] = ids
        self._written.append(cells.reshape(-1))

    def clear(self, row: int) -> None:
        """The row belongs to nobody, or to somebody new: all of it is null."""
        self.ids[row] = NULL_BLOCK
        self.cleared[row] = True
        self.num_clears += 1

    def clear_all(self) -> None:
        """As :meth:`clear`, for every row."""
        self.ids[...] = NULL_BLOCK
        self.mark_all_unstaged()

    def mark_all_unstaged(self) -> None:
        """Whoever staged this knows nothing of it any more."""
        self.cleared: BoolArray = np.ones(len(self.ids), np.bool_)
        cells = self._flat.nonzero()[0]
        self.width = int((cells % self._columns).max(initial=-1)) + 1
        self._written: list[IntArray] = [cells] if len(cells) else []
        self._skipped: list[IntArray] = []
        self.num_clears += 1

    @property
    def has_no_writes(self) -> bool:
        """Whether nothing was written since the last :meth:`take`."""
        return not self._written

    def take_writes(self, batch_row: IntArray, moved: bool) -> tuple[IntArray, IntArray, I32Array] | None:
        """Return what was written of the rows in the batch: batch rows, columns and ids, (n,) each; None for nothing.


        ``batch_row`` (M,) is negative for other rows, of which everything stays in the log. The ids are those of now.
        ``moved``: rows may have a batch row that had none the last time; else what was left then is skipped.
        """
        cells = self._pending_cells(moved)
        if cells is None:
            return None
        rows, columns = np.divmod(cells, self._columns)
        self.width = max(self.width, int(columns.max(initial=-1)) + 1)
        batch_rows = batch_row[rows]
        if len(batch_rows) and batch_rows.min() < 0:
            here = batch_rows >= 0
            self._skipped.append(cells[~here])
            cells, batch_rows, columns = cells[here], batch_rows[here], columns[here]
        return (batch_rows, columns, self._flat[cells]) if len(batch_rows) else None

    def copy_writes(self, batch_row: IntArray, moved: bool, out: I32Array) -> None:
        """As :meth:`take`, written to the batch_rows in ``out`` (R, max_blocks)."""
        writes = self.take_writes(batch_row, moved)
        if writes is not None:
            out[writes[0], writes[1]] = writes[2]

    def _pending_cells(self, moved: bool) -> IntArray | None:
        """Cells to look at, which leave the log."""
        if moved:
            self._written += self._skipped
            self._skipped = []
        if not self._written:
            return None
        cells = self._written[0] if len(self._written) == 1 else np.concatenate(self._written)
        self._written = []
        return cells if len(cells) else None


def expand_ranges(
    which: npt.NDArray[np.int64], first: IntArray, counts: IntArray
) -> tuple[npt.NDArray[np.int64], IntArray]:
    """The numbers of n spans, one span after the other: whose each is, and the number, (N,) each.

    which: (n,) who has a span. first: (n,) its first number. counts: (n,) how many it has, at least 1.
    """
    ends = counts.cumsum()
    if not len(ends) or ends[-1] == len(counts):
        return which, first
    return which.repeat(counts), np.arange(ends[-1]) + (first + counts - ends).repeat(counts)
