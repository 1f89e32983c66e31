"""The residual stream of one pass. Shapes: T tokens of all requests, M hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.models.norm import RMSNorm, Term

_MOST_TERMS = 2
"""Maximum number of terms that one kernel adds before a norm."""


class ResidualStream:
    """The residual stream, and up to two branch outputs that are not yet added to it.

    An output is added when a norm reads the stream, so that on CUDA one kernel does both. Outputs are added in place,
    one by one, in the stream's dtype; layers read the stream in the model's dtype.
    """

    __slots__ = ("_dtype", "_h_TM", "_keep_next", "_kept_TM", "_pending", "_shared")

    def __init__(self, h_TM: Tensor, dtype: torch.dtype) -> None:
        """h_TM: initial residual stream (T, M), written in place. dtype: dtype in which layers read it."""
        self._h_TM, self._dtype = h_TM, dtype
        self._pending: list[Term] = []
        self._shared = False
        """Whether `kept` is `_h_TM` itself, so that the next sum must be a new tensor."""
        self._keep_next, self._kept_TM = False, h_TM

    def add(self, y_TM: Tensor, factor: float) -> None:
        """Add `factor * y` to the residual stream. y must not be written to before the stream is next read."""
        if len(self._pending) == _MOST_TERMS:
            self.sum()
        self._pending.append((y_TM, factor))

    def add_normed(self, y_TM: Tensor, norm: RMSNorm, factor: float) -> None:
        """Add `factor * norm(y)` to the residual stream."""
        self.sum()
        if self._shared:
            self._h_TM, self._shared = self._h_TM.clone(), False
        norm.add_to(self._h_TM, y_TM, factor)

    def sum(self) -> Tensor:
        """Add all outputs, and return the residual stream (T, M) in its own dtype. Later sums change this tensor."""
        for y_TM, factor in self._pending:
            if self._shared:
                self._h_TM, self._shared = self._h_TM.add(y_TM, alpha=factor), False
            else:
                self._h_TM.add_(y_TM, alpha=factor)
        self._pending.clear()
        return self._h_TM

    def keep(self) -> None:
        """Save the input of the next layer as `kept`."""
        self._keep_next = True

    @property
    def kept(self) -> Tensor:
        """Residual stream (T, M) as the layer after `keep` reads it. Later sums do not change it."""
        return self._kept_TM

    def read(self) -> Tensor:
        """Return the residual stream (T, M) in the layers' dtype. The result may share its memory."""
        self.sum()
        return self._seen()

    def normed(self, norm: RMSNorm) -> Tensor:
        """Return the residual stream (T, M) after `norm`."""
        if not self._pending or self._shared:
            return norm(self.read())
        terms, self._pending = self._pending, []
        y_TM = norm.of_sum(self._h_TM, terms, self._dtype)
        if self._keep_next:
            self._seen()
        return y_TM

    def _seen(self) -> Tensor:
        seen_TM = self._h_TM.to(self._dtype)
        if self._keep_next:
            self._kept_TM, self._keep_next, self._shared = seen_TM, False, self._shared or seen_TM is self._h_TM
        return seen_TM

    def select(self, tokens: Tensor) -> ResidualStream:
        """Return a stream with only some tokens. tokens: (N,) int64 indices."""
        return ResidualStream(self.sum().index_select(0, tokens), self._dtype)
