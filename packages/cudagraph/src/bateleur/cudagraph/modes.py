"""Which kinds of batches are captured, and how."""

from __future__ import annotations

from enum import Enum


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
        return self if self.is_single else CudaGraphMode.FULL

    @property
    def mixed(self) -> CudaGraphMode:
        """How batches with a prefill row run: NONE, PIECEWISE or FULL."""
        if self is CudaGraphMode.FULL_DECODE_ONLY:
            return CudaGraphMode.NONE
        return CudaGraphMode.PIECEWISE if self is CudaGraphMode.FULL_AND_PIECEWISE else self

    @property
    def is_single(self) -> bool:
        """Whether decode and mixed batches run alike."""
        return self not in (CudaGraphMode.FULL_DECODE_ONLY, CudaGraphMode.FULL_AND_PIECEWISE)
