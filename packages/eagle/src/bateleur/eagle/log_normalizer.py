"""Exact log-sum-exp of logits, independent of sharding and order of summation.

Mass is exp(logit - max) in units of 2^-40, as in `bateleur.eagle.sampling_metadata`. It is summed as integers, so the
sum is exact.

Legend for shapes: N logit rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.eagle.vocab_shard import VocabShard


class LogNormalizer(NamedTuple):
    """The largest logit of N rows, and the logarithm of the sum of exp(logit - largest); (N, 1) float32 each."""

    best: Tensor
    log_mass: Tensor

    @classmethod
    def of(cls, logits: Tensor, shard: VocabShard | None = None) -> LogNormalizer:
        """Compute maximum and log-sum of (N, V) float32 logits. If `shard` is given, ranks exchange 16 bytes a row."""
        best_N1 = logits.amax(-1, keepdim=True)
        if shard is not None:
            best_N1 = shard.best(best_N1)
        mass_N1 = exact_sum((logits - best_N1).exp_(), 40, shard)
        return cls(best_N1, mass_N1.log_().float())

    def at(self, row: Tensor) -> LogNormalizer:
        """Return maximum and log-sum of the logit rows with index `row`, int64 of shape (...), in shape (..., 1)."""
        return LogNormalizer(self.best[row], self.log_mass[row])

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities (N, n) of logits (N, n) taken from the N rows, such as n columns of them."""
        return logits.sub(self.best).sub_(self.log_mass)


def exact_sum(x: Tensor, bits: int = 60, shard: VocabShard | None = None) -> Tensor:
    """Sum (N, V) float32 values in [0, 1], each truncated to a multiple of 2^-bits, and overwrite them.

    Returns (N, 1) float64, over all ranks if `shard` is given. Sums must stay below 8 with 60 bits, 2^23 with 40.
    """
    sum_N1 = x.mul_(2.0**bits).sum(-1, keepdim=True, dtype=torch.int64)
    if shard is not None:
        shard.collectives.sum_(sum_N1)
    return sum_N1.double().mul_(2.0**-bits)
