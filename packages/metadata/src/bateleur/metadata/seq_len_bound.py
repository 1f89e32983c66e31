"""Upper bounds of sequence lengths on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
I32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class InexactBound(ValueError):
    """The exact length of a request was read, but the host has only an upper bound of it."""


@dataclass(frozen=True, slots=True)
class SeqLenBound:
    """Upper bounds of the sequence lengths of a batch with R rows (requests), 0 in padded rows.

    With asynchronous speculative decoding only the device knows the number of accepted drafts. The host then counts
    every draft as accepted. Use :meth:`max` to size memory and launches. Read lengths of single rows only if they are
    exact.

    Attributes:
        upper: (R,) int32, upper bound of the keys after this step.
        exact: (R,) bool, True if the bound is the true length.
    """

    upper: I32Array
    exact: BoolArray

    def __post_init__(self) -> None:
        if self.upper.ndim != 1 or self.upper.shape != self.exact.shape:
            raise ValueError(
                f"exact: has shape {self.exact.shape}, but upper has {self.upper.shape}; both must be (rows,)"
            )

    def __len__(self) -> int:
        return len(self.upper)

    def max(self) -> int:
        """Return the largest upper bound, exact or not; 0 for an empty batch."""
        return int(self.upper.max()) if len(self.upper) else 0

    def per_row(self, rows: int | slice = slice(None)) -> Any:
        """Return lengths of the requests ``rows``: an int for an index, (n,) int32 for a slice. Raises
        :class:`InexactBound` if a selected request has only an upper bound.
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
        """Return the bounds after ``k`` more tokens, 0 in padded rows. Bounds lowered to ``cap`` become inexact.

        ``cap`` is ``max_model_len``. Raises ValueError for negative ``k``.
        """
        if k < 0:
            raise ValueError(f"k: {k} is negative; a bound can only advance")
        wide = self.upper.astype(np.int64) + k
        upper = np.where(self.upper > 0, np.minimum(wide, cap), 0).astype(np.int32)
        return SeqLenBound(upper, self.exact & ((self.upper == 0) | (wide <= cap)))

    def narrow(self, num_rows: int) -> SeqLenBound:
        """Return the bounds of the first ``num_rows`` requests, as views."""
        return SeqLenBound(self.upper[:num_rows], self.exact[:num_rows])
