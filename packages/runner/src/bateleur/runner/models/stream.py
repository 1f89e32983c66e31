"""The residual stream of one pass. Shapes: T tokens of all requests in one row, M hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.models.norm import RMSNorm


class Stream:
    """A residual stream, and what a branch has returned and nobody has added yet.

    A sum waits for the norm that reads it, so that on CUDA both are one kernel. It is taken in place, in the stream's
    dtype; layers read it in their own, the model's.
    """

    __slots__ = ("_dtype", "_h_TM", "_owed")

    def __init__(self, h_TM: Tensor, dtype: torch.dtype) -> None:
        """h_TM: where it begins, which is written to. dtype: of the layers."""
        self._h_TM, self._dtype = h_TM, dtype
        self._owed: tuple[Tensor, float] | None = None

    def add(self, y_TM: Tensor, factor: float) -> None:
        """Add `factor * y`; y is not to be written to before somebody reads."""
        self.sum()
        self._owed = y_TM, factor

    def add_normed(self, y_TM: Tensor, norm: RMSNorm, factor: float) -> None:
        """Add `factor * norm(y)`."""
        norm.add_to(self.sum(), y_TM, factor)

    def sum(self) -> Tensor:
        """(T, M) in the stream's dtype: the stream itself, to which the next layers add."""
        if self._owed is not None:
            y_TM, factor = self._owed
            self._owed = None
            self._h_TM.add_(y_TM, alpha=factor)
        return self._h_TM

    def read(self, *, copy: bool = False) -> Tensor:
        """(T, M) as layers see it. copy: and as it stays; it may be the stream itself without."""
        return self.sum().to(self._dtype, copy=copy)

    def normed(self, norm: RMSNorm) -> Tensor:
        """(T, M): the norm of what layers see."""
        if self._owed is None:
            return norm(self.read())
        y_TM, factor = self._owed
        self._owed = None
        return norm.of_sum(self._h_TM, y_TM, factor, self._dtype)

    def select(self, tokens: Tensor) -> Stream:
        """The stream of some tokens (N,) int64 alone."""
        return Stream(self.sum().index_select(0, tokens), self._dtype)
