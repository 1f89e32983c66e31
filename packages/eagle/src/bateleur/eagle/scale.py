"""What logits are probabilities of: normalisers that do not depend on who has which token, or in which order.

Mass is exp(logit - max) in units of 2^-40, as in `bateleur.eagle.law`, summed as integers, so the sum is exact.

Legend for shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bateleur.eagle.part import Part

_FINEST = 60


class Scale(NamedTuple):
    """Of N rows, (N, 1) float32 each: the largest logit, and the logarithm of the sum of exp(logit - that)."""

    best: Tensor
    log_mass: Tensor

    @classmethod
    def of(cls, logits: Tensor, part: Part | None = None) -> Scale:
        """Of (N, V) float32 logits; of a part of the vocabulary those of all ranks: 16 bytes a row go round."""
        best_N1 = logits.amax(-1, keepdim=True)
        if part is not None:
            best_N1 = part.best(best_N1)
        mass_N1 = whole_sum((logits - best_N1).exp_(), 40, part)
        return cls(best_N1, mass_N1.log_().float())

    def at(self, row: Tensor) -> Scale:
        """Of rows (...) int64, (..., 1) each."""
        return Scale(self.best[row], self.log_mass[row])

    def log_probs(self, logits: Tensor) -> Tensor:
        """Logarithms of the probabilities of logits (N, n) of these rows."""
        return logits.sub(self.best).sub_(self.log_mass)


def whole_sum(x: Tensor, bits: int = _FINEST, part: Part | None = None) -> Tensor:
    """The sum of (N, V) float32 in [0, 1], overwritten, in units of 2^-bits: (N, 1) float64, of a part's that of all
    ranks. With 60 bits sums are below 8, with 40 below 2^23.
    """
    sum_N1 = x.mul_(2.0**bits).sum(-1, keepdim=True, dtype=torch.int64)
    if part is not None:
        part.exchange.sum_(sum_N1)
    return sum_N1.double().mul_(2.0**-bits)
