"""Vocabulary-parallel sampling: each rank has a shard of the vocabulary, and all ranks agree on a token.

Noise is keyed by token id, so each rank finds the best token of its own shard: the token with the largest value, which
is its logit, plus noise unless the row is greedy. The ranks then all-reduce one 8-byte integer per row by maximum. Its
upper half is the value, mapped to an integer so that integers compare as the values do. Its lower half is the token id,
counted backwards, so the lowest id wins among equal values. NaN is larger than any value, as in `argmax`.

Legend for shapes: N rows of logits, L tokens of a shard, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_LAST = (1 << 32) - 1
_NAN_BITS, _INF_ORDER = 0x7FC00000, 0x7F800000


class ShardCollectives(Protocol):
    """Collective operations of the ranks that share the vocabulary, which all call them in the same order."""

    @property
    def rank(self) -> int:
        """Index of this rank among the ranks that share the vocabulary."""

    @property
    def size(self) -> int:
        """Number of ranks that share the vocabulary."""

    def max_(self, x: Tensor) -> Tensor:
        """All-reduce `x`, int64, by maximum over the ranks, in place."""

    def sum_(self, x: Tensor) -> Tensor:
        """All-reduce `x` by sum over the ranks, in place."""

    def every(self, x: Tensor) -> Tensor:
        """All-gather `x` of every rank; returns (size, *x.shape)."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The tokens of one rank: rank r has the ids `starts[r]` to `starts[r + 1] - 1`.

    starts: (ranks + 1) ascending ids, from 0 to V; no shard is empty.
    collectives: how the ranks communicate.

    Raises `ValueError` if `starts` does not fit the number of ranks.
    """

    starts: tuple[int, ...]
    collectives: ShardCollectives

    def __post_init__(self) -> None:
        ascends = all(one < other for one, other in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != self.collectives.size + 1 or self.starts[0] or not ascends:
            raise ValueError(
                f"starts={self.starts}: must ascend from 0 to the size of the vocabulary, with a shard for each of "
                f"{self.collectives.size} ranks"
            )

    @property
    def first(self) -> int:
        """The first token id of this rank."""
        return self.starts[self.collectives.rank]

    @property
    def end(self) -> int:
        """One more than the last token id of this rank."""
        return self.starts[self.collectives.rank + 1]

    @property
    def size(self) -> int:
        """Number of tokens of this rank."""
        return self.end - self.first

    @property
    def widest(self) -> int:
        """The size of the largest shard."""
        return max(end - first for first, end in zip(self.starts, self.starts[1:], strict=False))

    @property
    def vocab_size(self) -> int:
        """V: the number of tokens of all ranks."""
        return self.starts[-1]

    def reduce_argmax(self, value_N: Tensor, index_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token id of the maximum over all shards, (N,) int64, and whether each row is bad, (N,) bool. Of
        equal values the lowest id is returned. A row is bad if it holds NaN, or no value above -inf; its token id is 0.

        value_N: (N,) floating, no wider than float32: the maximum of this shard, NaN if the row holds one, -inf if no
            value is above -inf.
        index_N: (N,) int64, the first index of the maximum in this shard; ignored in bad rows.
        """
        packed_N = self.collectives.max_(self._packed(value_N, index_N))
        # The order of -inf is one further from 0 than that of inf.
        bad_N = (packed_N >> 32).abs_() > _INF_ORDER
        return packed_N.bitwise_and_(_LAST).neg_().add_(_LAST).masked_fill_(bad_N, 0), bad_N

    def top(self, values_Nn: Tensor, indices_Nn: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Return the `num` largest values of all shards, (N, num) float32, and their token ids, int64; of equal
        values the lowest id first.

        values_Nn, indices_Nn: the n largest values of this shard and their indices. n is `num`, or the size of the
            shard if that is smaller.
        """
        short = num - values_Nn.shape[1]
        packed_Nn = pad(self._packed(values_Nn, indices_Nn), (0, short), value=torch.iinfo(torch.int64).min)
        every_NX = self.collectives.every(packed_Nn).movedim(0, 1).flatten(1)
        packed_Nn = every_NX.topk(num, dim=-1).values
        return float_of(packed_Nn >> 32), _LAST - (packed_Nn & _LAST)

    def _packed(self, value: Tensor, index: Tensor) -> Tensor:
        return order_of(value).bitwise_left_shift_(32).add_(_LAST - self.first).sub_(index)

    def best(self, value_N: Tensor) -> Tensor:
        """Return the maximum of `value_N` over all shards, for each row: (N,) float32; NaN if one is NaN."""
        return float_of(self.collectives.max_(order_of(value_N)))

    def local_indices(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of tokens in this shard, int64 (0 for other tokens), and whether they are in it, bool."""
        index = token_ids - self.first
        here = (index >= 0) & (index < self.size)
        return index.masked_fill_(~here, 0), here


def order_of(x: Tensor) -> Tensor:
    """Map floats to int64 numbers in the range of int32 that compare as the floats do. Both zeros get the same number;
    NaN is above inf.
    """
    x = x.float() + 0.0
    bits = x.view(torch.int32).masked_fill(x.isnan(), _NAN_BITS)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()


def float_of(order: Tensor) -> Tensor:
    """Map the numbers of `order_of` back to float32, its inverse."""
    bits = order.int()
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32)


class LogNormalizer(NamedTuple):
    """The largest logit of N rows, and the logarithm of the sum of exp(logit - largest); (N, 1) float32 each.

    The terms are summed as integers, in units of 2^-40 as in `sampling_metadata`, so that the sum is exact and does not
    depend on sharding.
    """

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
