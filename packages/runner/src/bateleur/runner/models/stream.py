"""The residual stream of one pass. Shapes: T tokens of all requests in one row, M hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.models.norm import RMSNorm, Term

_MOST_TERMS = 2
"""That one kernel adds before a norm."""


class Stream:
    """A residual stream, and what one branch has returned, or two beside each other, and nobody has added yet.

    Sums wait for the norm that reads them, so that on CUDA they are one kernel with it. They are taken in place, one by
    one, in the stream's dtype; layers read it in their own, the model's.
    """

    __slots__ = ("_dtype", "_h_TM", "_keeps", "_kept_TM", "_lent", "_owed")

    def __init__(self, h_TM: Tensor, dtype: torch.dtype) -> None:
        """h_TM: where it begins, which is written to. dtype: of the layers."""
        self._h_TM, self._dtype = h_TM, dtype
        self._owed: list[Term] = []
        self._lent = False
        """Whether somebody keeps what `_h_TM` is now, so that the next sum is another tensor."""
        self._keeps, self._kept_TM = False, h_TM

    def add(self, y_TM: Tensor, factor: float) -> None:
        """Add `factor * y`; y is not to be written to before somebody reads."""
        if len(self._owed) == _MOST_TERMS:
            self.sum()
        self._owed.append((y_TM, factor))

    def add_normed(self, y_TM: Tensor, norm: RMSNorm, factor: float) -> None:
        """Add `factor * norm(y)`."""
        self.sum()
        if self._lent:
            self._h_TM, self._lent = self._h_TM.clone(), False
        norm.add_to(self._h_TM, y_TM, factor)

    def sum(self) -> Tensor:
        """(T, M) in the stream's dtype: the stream itself, to which the next layers add."""
        for y_TM, factor in self._owed:
            if self._lent:
                self._h_TM, self._lent = self._h_TM.add(y_TM, alpha=factor), False
            else:
                self._h_TM.add_(y_TM, alpha=factor)
        self._owed.clear()
        return self._h_TM

    def keep(self) -> None:
        """Let `kept` be what the next layer sees: it is summed when that looks."""
        self._keeps = True

    @property
    def kept(self) -> Tensor:
        """(T, M) as layers saw it when it was to be kept, and as it stays."""
        return self._kept_TM

    def read(self) -> Tensor:
        """(T, M) as layers see it; it may be the stream itself."""
        self.sum()
        return self._seen()

    def normed(self, norm: RMSNorm) -> Tensor:
        """(T, M): the norm of what layers see."""
        if not self._owed or self._lent:
            return norm(self.read())
        terms, self._owed = self._owed, []
        y_TM = norm.of_sum(self._h_TM, terms, self._dtype)
        if self._keeps:
            self._seen()
        return y_TM

    def _seen(self) -> Tensor:
        seen_TM = self._h_TM.to(self._dtype)
        if self._keeps:
            self._kept_TM, self._keeps, self._lent = seen_TM, False, self._lent or seen_TM is self._h_TM
        return seen_TM

    def select(self, tokens: Tensor) -> Stream:
        """The stream of some tokens (N,) int64 alone."""
        return Stream(self.sum().index_select(0, tokens), self._dtype)
