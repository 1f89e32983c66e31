"""Vocabulary-parallel sampling: each rank has a shard of the vocabulary, and all ranks agree on a token.

Noise is keyed by token id, so each rank finds the best token of its own shard. The ranks then take the maximum of one
8-byte number per row: the value in the upper half, as an integer of the same order, and the token id in the lower
half, counted backwards. The maximum is the first maximum of all shards. NaN is larger than any value, as in `argmax`.

Legend for shapes: N rows of logits, L tokens of a shard, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

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
        """Return the first maximum of all shards: token ids (N,) int64, and whether the row is bad, (N,) bool, as in
        `SampledTokens`.

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
    """Map floats to int64 numbers of the same order, in the range of int32. Both zeros are equal; NaN is above inf."""
    x = x.float() + 0.0
    bits = x.view(torch.int32).masked_fill(x.isnan(), _NAN_BITS)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()


def float_of(order: Tensor) -> Tensor:
    """Map the numbers of `order_of` back to float32, its inverse."""
    bits = order.int()
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32)
