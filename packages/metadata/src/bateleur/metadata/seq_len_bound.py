"""What the host knows about sequence lengths: bounds, of which some are exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
I32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class InexactBound(ValueError):
    """A per-row length was read where the host has only an upper bound."""


@dataclass(frozen=True, slots=True)
class SeqLenBound:
    """Upper bounds of the sequence lengths of a batch, 0 in padded rows.

    With asynchronous speculation the true lengths live on the device, and the host counts every draft as
    accepted. Sizing from the maximum is always right; reading one row is right only where the row is exact.

    Attributes:
        upper: (R,) int32, upper bound of keys after this step.
        exact: (R,) bool, whether the bound is the true length.
    """

    upper: I32Array
    exact: BoolArray

    def __post_init__(self) -> None:
        """Check that both halves describe the same rows."""
        if self.upper.ndim != 1 or self.upper.shape != self.exact.shape:
            raise ValueError(
                f"exact: has shape {self.exact.shape}, but upper has {self.upper.shape}; both must be (rows,)"
            )

    def __len__(self) -> int:
        return len(self.upper)

    def max(self) -> int:
        """The largest bound, 0 for no rows: always allowed."""
        return int(self.upper.max()) if len(self.upper) else 0

    def per_row(self, rows: int | slice = slice(None)) -> Any:
        """Lengths of ``rows``: an ``int`` for an index, an (n,) int32 array for a slice.

        Raises:
            InexactBound: a selected row has only an upper bound.
        """
        if not np.all(self.exact[rows]):
            row = np.extract(~self.exact[rows], np.arange(len(self.upper))[rows])[0]
            raise InexactBound(
                f"rows: row {row} has only an upper bound of {self.upper[row]}; "
                "per-row lengths may be read from exact rows only, sizes from max()"
            )
        value = self.upper[rows]
        return int(value) if isinstance(rows, int) else value

    def advanced(self, k: int, cap: int) -> SeqLenBound:
        """The bound ``k`` tokens later: ``min(upper + k, cap)``, still 0 where it was 0 (padded rows).

        ``cap`` is the model's maximum length. Rows that the cap shortens stay upper bounds, and lose
        exactness.
        """
        if k < 0:
            raise ValueError(f"k: {k} is negative; a bound can only advance")
        wide = self.upper.astype(np.int64) + k
        upper = np.where(self.upper > 0, np.minimum(wide, cap), 0).astype(np.int32)
        return SeqLenBound(upper, self.exact & ((self.upper == 0) | (wide <= cap)))

    def narrow(self, num_rows: int) -> SeqLenBound:
        """The first ``num_rows`` rows, as views."""
        return SeqLenBound(self.upper[:num_rows], self.exact[:num_rows])
