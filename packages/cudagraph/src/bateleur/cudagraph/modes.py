"""Which kinds of batches are captured, and how."""

from __future__ import annotations

from enum import Enum

_SUPPORT = (
    "no attention",
    "rows of one token",
    "rows of equal length",
    "every batch",
)


class CudaGraphMode(Enum):
    """How decode batches and mixed batches run.

    NONE: everything runs eagerly.
    PIECEWISE: the pieces between attention-like operators are captured, for every batch.
    FULL: the whole forward pass is captured, for every batch.
    FULL_DECODE_ONLY: decode batches run as FULL, mixed batches eagerly.
    FULL_AND_PIECEWISE: decode batches run as FULL, mixed batches as PIECEWISE.

    The first three are how one graph is made; the last two are policies over two kinds of batches.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode(self) -> CudaGraphMode:
        """How decode batches run: NONE, PIECEWISE or FULL."""
        two_kinds = self in (CudaGraphMode.FULL_DECODE_ONLY, CudaGraphMode.FULL_AND_PIECEWISE)
        return CudaGraphMode.FULL if two_kinds else self

    @property
    def mixed(self) -> CudaGraphMode:
        """How batches with a prefill row run: NONE, PIECEWISE or FULL."""
        if self is CudaGraphMode.FULL_DECODE_ONLY:
            return CudaGraphMode.NONE
        return CudaGraphMode.PIECEWISE if self is CudaGraphMode.FULL_AND_PIECEWISE else self

    def resolve(self, support: int, *, query_len: int = 1) -> tuple[CudaGraphMode, str | None]:
        """Return the nearest mode that the model can run, and a sentence why it is another one, if it is.

        support: what FULL graphs may hold, the least over all metadata builders: 0 nothing, 1 rows of one token,
            2 rows of equal length, 3 every batch.
        query_len: tokens of the longest decode row, 1 + num_spec.
        Raises `ValueError` for a number outside its range.
        """
        if not 0 <= support < len(_SUPPORT):
            raise ValueError(f"support={support} must be in [0, {len(_SUPPORT) - 1}]")
        if query_len < 1:
            raise ValueError(f"query_len={query_len} must be at least 1")
        if self.decode is CudaGraphMode.FULL and support < (1 if query_len == 1 else 2):
            # What captures decode batches in pieces has no reason left to run the others eagerly.
            mode, reason = CudaGraphMode.PIECEWISE, f"decode rows have up to {query_len} tokens"
        elif self.mixed is CudaGraphMode.FULL and support < 3:
            mode, reason = CudaGraphMode.FULL_AND_PIECEWISE, "the mode asks for every batch"
        else:
            return self, None
        return (
            mode,
            f"{self.value} became {mode.value}: a full graph may hold {_SUPPORT[support]}, and {reason}",
        )
