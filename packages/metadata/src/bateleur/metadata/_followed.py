"""Which request rows have a place in the batch, and what of their tables the batch does not hold yet."""

from collections.abc import Sequence

import numpy as np

from bateleur.metadata.bounds import BoolArray, I32Array, IntArray
from bateleur.metadata.tables import BlockTable


class FollowedTables:
    """The tables of all groups, for one stager. ``place`` (M,) is the place of each request row, -1 for none."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.num_rows = len(tables[0].ids) if tables else 0
        self._iota: IntArray = np.arange(self.num_rows, dtype=np.int64)
        self.lose()

    def lose(self) -> None:
        """The batch holds other tables."""
        self._place: IntArray = np.full(self.num_rows, -1, np.int64)
        self._rows: IntArray = self._iota[:0]
        self._known = b""
        self._version = -1

    def forget(self) -> None:
        """Nothing is known of what any device or batch holds."""
        self.lose()
        for table in self.tables:
            table.renew()

    def none_cleared(self) -> bool:
        """Whether every row is still whose it was when rows last got their places."""
        version = 0
        for table in self.tables:
            version += table.version
        return version == self._version

    def unchanged(self) -> bool:
        """Whether the rows that have places now would find their cells as they are there."""
        version = 0
        for table in self.tables:
            if not table.untouched:
                return False
            version += table.version
        return version == self._version

    def place(self, rows: IntArray) -> BoolArray | None:
        """Give rows (R,) their places: which of them hold another row's cells, (R,), or None if none does."""
        version = sum(table.version for table in self.tables)
        known = rows.tobytes()
        if known == self._known and version == self._version:
            return None
        moved: BoolArray = np.ones(len(rows), np.bool_)
        both = min(len(rows), len(self._rows))
        np.not_equal(rows[:both], self._rows[:both], out=moved[:both])
        for table in self.tables:
            moved |= table.fresh[rows]
        self._place[self._rows] = -1
        self._place[rows] = self._iota[: len(rows)]
        self._rows, self._known, self._version = rows.copy(), known, version
        return moved

    def take(self, index: int, moved: bool) -> tuple[IntArray, IntArray, I32Array] | None:
        """What was written of table ``index`` since its rows were staged last, see :meth:`BlockTable.take`."""
        return self.tables[index].take(self._place, moved)

    def write_news(self, index: int, moved: bool, out: I32Array) -> None:
        """The same, written to ``out``, see :meth:`BlockTable.write_news`."""
        self.tables[index].write_news(self._place, moved, out)
