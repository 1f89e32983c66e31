"""`CudaGraphMode`: which batches run on a graph, and how each graph is captured."""

from __future__ import annotations

from enum import Enum

_SUPPORT = ("no attention", "rows of one token", "rows of equal length", "every batch")


class CudaGraphMode(Enum):
    """How decode batches and mixed batches run. The names are those of vLLM's `CUDAGraphMode`.

    A decode batch has only requests that have finished their prompts. A mixed batch has at least one prefill.

    NONE: all batches run eagerly.
    PIECEWISE: all batches run on piecewise graphs. Attention-like operators run eagerly between two captured pieces.
    FULL: all batches run on full graphs. One graph holds the whole forward pass.
    FULL_DECODE_ONLY: decode batches run on full graphs, mixed batches run eagerly.
    FULL_AND_PIECEWISE: decode batches run on full graphs, mixed batches on piecewise graphs.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode_mode(self) -> CudaGraphMode:
        """How decode batches run: NONE, PIECEWISE or FULL."""
        two_kinds = self in (CudaGraphMode.FULL_DECODE_ONLY, CudaGraphMode.FULL_AND_PIECEWISE)
        return CudaGraphMode.FULL if two_kinds else self

    @property
    def mixed_mode(self) -> CudaGraphMode:
        """How mixed batches run: NONE, PIECEWISE or FULL."""
        if self is CudaGraphMode.FULL_DECODE_ONLY:
            return CudaGraphMode.NONE
        return CudaGraphMode.PIECEWISE if self is CudaGraphMode.FULL_AND_PIECEWISE else self

    def resolve(self, support: int, *, query_len: int = 1) -> tuple[CudaGraphMode, str | None]:
        """Return the nearest mode that the model's attention backends can run, and why it differs from this mode (None
        if it does not).

        Args:
            support: which batches a full graph may hold, the smallest value over all metadata builders.
                0: none, 1: requests of one token, 2: requests of equal length, 3: every batch.
            query_len: tokens of the longest decode: 1 + the number of draft tokens.
        """
        if not 0 <= support < len(_SUPPORT):
            raise ValueError(f"support={support} must be in [0, {len(_SUPPORT) - 1}]")
        if query_len < 1:
            raise ValueError(f"query_len={query_len} must be at least 1")
        if self.decode_mode is CudaGraphMode.FULL and support < (1 if query_len == 1 else 2):
            # PIECEWISE serves mixed batches too, so none of them needs to run eagerly.
            mode, reason = CudaGraphMode.PIECEWISE, f"decode rows have up to {query_len} tokens"
        elif self.mixed_mode is CudaGraphMode.FULL and support < 3:
            mode, reason = CudaGraphMode.FULL_AND_PIECEWISE, "the mode asks for every batch"
        else:
            return self, None
        return (mode, f"{self.value} became {mode.value}: a full graph may hold {_SUPPORT[support]}, and {reason}")
