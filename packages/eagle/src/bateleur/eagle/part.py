"""A vocabulary of which several ranks have a part each, and how they agree on a token of it.

Noise is keyed by token, so each rank finds the best of its own part, and what it tells the others is one number of 8
bytes a row: above the value, as an integer of the same order, and below it the id, counted from behind. The largest of
these numbers is the first maximum of all parts; NaN is above every value, as in `argmax`.

Legend for shapes: N rows, L tokens of a part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_LAST = (1 << 32) - 1
_NAN_BITS, _INF_ORDER = 0x7FC00000, 0x7F800000


class Exchange(Protocol):
    """What ranks tell each other. All of them call the same, in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def max_(self, x: Tensor) -> Tensor:
        """The largest of what the ranks have, entry by entry, int64, in place."""
        ...

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have, entry by entry, in place."""
        ...

    def every(self, x: Tensor) -> Tensor:
        """(size, *x.shape) what each rank has."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of one rank: those of rank r are `starts[r]` to `starts[r + 1] - 1`.

    starts: (ranks + 1) ascending ids, from 0 to V, no part empty. exchange: the way to the others.

    `ValueError` unless the starts are those of as many ranks.
    """

    starts: tuple[int, ...]
    exchange: Exchange

    def __post_init__(self) -> None:
        ascends = all(one < other for one, other in zip(self.starts, self.starts[1:], strict=False))
        if len(self.starts) != self.exchange.size + 1 or self.starts[0] or not ascends:
            raise ValueError(
                f"starts is {self.starts}; it must ascend from 0 to the size of the vocabulary, with a part for each "
                f"of {self.exchange.size} ranks"
            )

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return self.starts[self.exchange.rank]

    @property
    def end(self) -> int:
        """One behind its last."""
        return self.starts[self.exchange.rank + 1]

    @property
    def widest(self) -> int:
        """Tokens of the rank that has the most."""
        return max(end - first for first, end in zip(self.starts, self.starts[1:], strict=False))

    @property
    def vocab_size(self) -> int:
        """V: tokens of all ranks."""
        return self.starts[-1]

    def elect(self, value_N: Tensor, lane_N: Tensor) -> tuple[Tensor, Tensor]:
        """The first maximum of all parts: token ids (N,) int64, and which rows are bad (N,) bool, as of `Drawn`.

        value_N: (N,) floating, no wider than float32: the best of this part, NaN if the row holds one, -inf if nothing
            is above that. lane_N: (N,) int64, the first place of it in this part; of no meaning in other rows.
        """
        packed_N = self.exchange.max_(self._packed(value_N, lane_N))
        # -inf is one further from 0 than inf.
        bad_N = (packed_N >> 32).abs_() > _INF_ORDER
        return packed_N.bitwise_and_(_LAST).neg_().add_(_LAST).masked_fill_(bad_N, 0), bad_N

    def top(self, values_Nn: Tensor, lanes_Nn: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Of the largest of each part, (N, n) float32 and their places, the `num` largest of all: (N, num) float32 and
        token ids int64, of equal ones the lowest first. n is `num`, or all that the part has.
        """
        short = num - values_Nn.shape[1]
        packed_Nn = pad(self._packed(values_Nn, lanes_Nn), (0, short), value=torch.iinfo(torch.int64).min)
        every_NX = self.exchange.every(packed_Nn).movedim(0, 1).flatten(1)
        packed_Nn = every_NX.topk(num, dim=-1).values
        return float_of(packed_Nn >> 32), _LAST - (packed_Nn & _LAST)

    def _packed(self, value: Tensor, lane: Tensor) -> Tensor:
        return order_of(value).bitwise_left_shift_(32).add_(_LAST - self.first).sub_(lane)

    def best(self, value_N: Tensor) -> Tensor:
        """(N,) float32, the largest of what the parts have, NaN if one has that."""
        return float_of(self.exchange.max_(order_of(value_N)))

    def lanes(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens are in this part, int64, 0 if they are not; and whether they are, bool."""
        lane = token_ids - self.first
        here = (lane >= 0) & (lane < self.end - self.first)
        return lane.masked_fill_(~here, 0), here


def order_of(x: Tensor) -> Tensor:
    """Integers of the same order, int64, of the range of int32, of floats no wider than float32; both zeros have one,
    and NaN is above inf.
    """
    x = x.float() + 0.0
    bits = x.view(torch.int32).masked_fill(x.isnan(), _NAN_BITS)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()


def float_of(order: Tensor) -> Tensor:
    """What `order_of` was made of."""
    bits = order.int()
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32)
