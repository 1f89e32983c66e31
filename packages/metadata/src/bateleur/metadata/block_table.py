"""Block tables of running requests on the host, with a log of writes for incremental staging."""

import numpy as np
import numpy.typing as npt

from bateleur.metadata.fields import NULL_BLOCK
from bateleur.metadata.seq_len_bound import BoolArray, I32Array, IntArray


class BlockTable:
    """Block ids of all requests of one KV-cache group, one row each, and the log of writes that are not staged yet.

    A step names rows of the table, and :class:`InputBuffers` (one per table) copies only ids written since the row was
    last staged. Read ``ids`` directly, but write through the methods. Columns after a row's last block must be 0, the
    null block.

    Attributes:
        ids: (M, max_blocks) int32, for M requests that may run at once.
        width: number of leading columns that may hold ids, as of the last :meth:`take_writes`.
        cleared: (M,) bool, rows cleared and not staged since.
        num_clears, num_writes: number of clears and of writes so far.
    """

    def __init__(self, ids: I32Array) -> None:
        """Wrap ``ids``; no entry counts as staged. Raises ValueError if ``ids`` is not a contiguous int32 matrix."""
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
        """Set entries ``[rows, columns]`` of the table to ``ids`` and log them; rows and columns are broadcast."""
        self.write_cells(np.asarray(rows, np.int64) * self._columns + columns, ids)

    def write_cells(self, cells: npt.NDArray[np.int64], ids: npt.ArrayLike) -> None:
        """Set entries of the table to ``ids`` and log them.

        cells: (n,) ``row * max_blocks + column``. The log keeps this array, so do not change it later.
        """
        self.num_writes += 1
        self._flat[cells] = ids
        self._written.append(cells.reshape(-1))

    def clear(self, row: int) -> None:
        """Set a row to the null block, for a request that ends or begins."""
        self.ids[row] = NULL_BLOCK
        self.cleared[row] = True
        self.num_clears += 1

    def clear_all(self) -> None:
        """Set all rows of the table to the null block."""
        self.ids[...] = NULL_BLOCK
        self.mark_all_unstaged()

    def mark_all_unstaged(self) -> None:
        """Treat all contents as not staged."""
        self.cleared: BoolArray = np.ones(len(self.ids), np.bool_)
        cells = self._flat.nonzero()[0]
        self.width = int((cells % self._columns).max(initial=-1)) + 1
        self._written: list[IntArray] = [cells] if len(cells) else []
        self._skipped: list[IntArray] = []
        self.num_clears += 1

    def take_writes(self, batch_row: IntArray, moved: bool) -> tuple[IntArray, IntArray, I32Array] | None:
        """Return the logged writes of requests in the batch, and remove them from the log.

        Returns batch rows, columns and current ids, (n,) each; None if the log has no write of these requests. Writes
        of other requests stay in the log.

        batch_row: (M,) batch row of each row of this table; -1 if the row is not in the batch.
        moved: whether ``batch_row`` may have changed since the last call. If not, only writes since that call are
            searched, because all older ones in the log belong to requests outside of the batch.
        """
        if moved:
            self._written += self._skipped
            self._skipped = []
        if not self._written:
            return None
        cells, self._written = np.concatenate(self._written), []
        rows, columns = np.divmod(cells, self._columns)
        self.width = max(self.width, int(columns.max(initial=-1)) + 1)
        batch_rows = batch_row[rows]
        here = batch_rows >= 0
        if not here.all():
            self._skipped.append(cells[~here])
            cells, batch_rows, columns = cells[here], batch_rows[here], columns[here]
        return (batch_rows, columns, self._flat[cells]) if len(batch_rows) else None


def expand_ranges(
    which: npt.NDArray[np.int64], first: IntArray, counts: IntArray
) -> tuple[npt.NDArray[np.int64], IntArray]:
    """Expand n ranges of integers to (owner, value) pairs, (N,) each.

    which: (n,) owner of each range. first: (n,) first value. counts: (n,) length, at least 1.
    """
    ends = counts.cumsum()
    if not len(ends) or ends[-1] == len(counts):
        return which, first
    return which.repeat(counts), np.arange(ends[-1]) + (first + counts - ends).repeat(counts)
