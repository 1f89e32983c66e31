"""min_p, top_k and top_p for a vocabulary that is sharded over ranks.

All ranks find the same threshold of a row, digit by digit (8 bits each). Values are mapped to integers of the same
order (`order_of`). For each of the 256 values of a digit the ranks sum the number or the mass of the tokens that have
it. The traffic does not grow with the vocabulary, and the integer sums do not depend on the sharding. Of equal logits
the lowest ids are kept, so each rank computes how many of its own equal logits are kept.

The mass of a token is exp(logit - max) in units of 2^-40, as in `bateleur.eagle.sampling_metadata`.

Legend for shapes: N logit rows, L tokens of the shard, D values of a digit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.eagle.rules import apply_temperature
from bateleur.eagle.sampling_metadata import LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P, SamplingMetadata
from bateleur.eagle.vocab_shard import VocabShard, float_of, order_of
from bateleur.metadata.dispatch import Implementations

DIGIT = 8
"""Bits of the ordered integers that one pass of a search determines."""
_LEAST = torch.finfo(torch.float32).min


class _Edge(NamedTuple):
    """The threshold of each row, and counts of its ties, the tokens with a logit equal to the threshold.

    order: (N,) int64, the threshold as an integer of the same order, see `order_of`.
    kept, ties, own: (N,) int64: kept ties of all ranks, ties of all ranks, ties in this shard. All are 0 if only min_p
        applies, because it keeps every tie.
    """

    order: Tensor
    kept: Tensor
    ties: Tensor
    own: Tensor


def shard_thresholds(logits: Tensor, metadata: SamplingMetadata, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Find truncation thresholds from the logits (N, L) of a shard.

    Returns the smallest kept logit after the temperature, (N,) float32, equal on all ranks; and the last kept index
    of this shard that is equal to it, (N,) int32: -1 if none is kept, L if all are.
    """
    values, size = metadata.values, logits.shape[1]
    scaled_NL = apply_temperature(logits.float(), values[:, TEMPERATURE])
    best_N = shard.best(scaled_NL.amax(-1))
    # A token with logit -inf is never kept, so the floor is finite.
    least_N = (best_N + values[:, LOG_MIN_P]).clamp_min_(_LEAST)
    last_N = torch.full_like(least_N, size, dtype=torch.int32)
    if len(metadata.truncated(shard.vocab_size)):
        nothing_N = torch.zeros_like(last_N, dtype=torch.int64)
        edge = _Edge(order_of(least_N), nothing_N, nothing_N, nothing_N)
        top_k = metadata.host[:, TOP_K]
        if ((top_k > 0) & (top_k < shard.vocab_size)).any():
            edge = _top(scaled_NL, edge.order, values[:, TOP_K].long(), shard)
        if (metadata.host[:, TOP_P] < 1).any():
            edge = _nucleus(scaled_NL, best_N, edge, values[:, TOP_P], shard)
        least_N = float_of(edge.order)
        before_N = shard.collectives.every(edge.own)[: shard.collectives.rank].sum(0)
        kept_N = (edge.kept - before_N).clamp_min_(0).minimum(edge.own)
        last_N = LAST_TIE.on(scaled_NL)(scaled_NL, least_N, kept_N, edge.own)
    lawful_N = (values[:, TEMPERATURE] > 0) & best_N.isfinite()
    return least_N.where(lawful_N, -torch.inf), last_N.where(lawful_N, size)


def _top(scaled_NL: Tensor, floor_N: Tensor, top_k_N: Tensor, shard: VocabShard) -> _Edge:
    """Find the top_k threshold of each row among the tokens at or above the integer `floor_N`, see `order_of`."""
    size = shard.vocab_size
    top_k_N = top_k_N.where((top_k_N > 0) & (top_k_N < size), size)
    order_N, above_N, ties_N, own_N = _search(scaled_NL, None, floor_N, top_k_N.minimum, shard)
    return _Edge(order_N, ties_N.minimum(top_k_N - above_N), ties_N, own_N)


def _nucleus(scaled_NL: Tensor, best_N: Tensor, edge: _Edge, top_p_N: Tensor, shard: VocabShard) -> _Edge:
    """Find the top_p threshold of each row among the tokens that `edge` keeps. best_N: largest logit of each row."""

    def mass_of(x: Tensor, best: Tensor) -> Tensor:
        return (x - best).exp_().double().mul_(2.0**40).long()

    # Dropped ties do not count in the mass.
    surplus_N = (edge.ties - edge.kept) * mass_of(float_of(edge.order), best_N)
    limit_N = torch.zeros_like(best_N, dtype=torch.float64)

    def goal(total_N: Tensor) -> Tensor:
        return limit_N.copy_((total_N - surplus_N).double() * top_p_N)

    mass_NL = (scaled_NL - best_N.unsqueeze(1)).exp_()
    order_N, above_N, level_N, own_level_N = _search(scaled_NL, mass_NL, edge.order, goal, shard)
    unit_N = mass_of(float_of(order_N), best_N).clamp_min_(1)
    ties_N = level_N // unit_N
    most_N = ties_N.where((order_N != edge.order) | (edge.ties == 0), edge.kept)
    needed_N = ((limit_N - above_N.double()) / unit_N.double()).long()
    needed_N += (above_N + needed_N * unit_N).double() < limit_N
    inner = _Edge(order_N, needed_N.clamp_min_(1).minimum(most_N), ties_N, own_level_N // unit_N)
    return _Edge(*(one.where(top_p_N < 1, other) for one, other in zip(inner, edge, strict=True)))


def _search(
    scaled_NL: Tensor, mass_NL: Tensor | None, start_N: Tensor, goal: Callable[[Tensor], Tensor], shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the largest value at or above `start_N` such that the tokens at or above it have at least the weight `goal`.

    The weight of a token is its mass, or 1 if `mass_NL` is None. Values are integers of the same order (`order_of`).
    Returns the value, the weight of tokens above it and equal to it, and the weight of the equal ones in this shard;
    (N,) int64 each.

    goal: maps the total weight of the tokens at or above `start_N`, (N,) int64, to the weight to reach.
    """
    above_N, goal_N1 = torch.zeros_like(start_N), None
    for shift in range(32 - DIGIT, -1, -DIGIT):
        own_ND = HISTOGRAM.on(scaled_NL)(scaled_NL, mass_NL, start_N, shift)
        every_ND = shard.collectives.sum_(own_ND.clone())
        # The weight that is not below each value of the digit.
        reached_ND = every_ND.flip(1).cumsum(1).flip(1).add_(above_N.unsqueeze(1))
        if goal_N1 is None:
            goal_N1 = goal(reached_ND[:, 0]).double().unsqueeze(1)
        digit_N1 = (reached_ND.double() >= goal_N1).sum(1, keepdim=True).sub_(1).clamp_min_(0)
        level_N = every_ND.gather(1, digit_N1).squeeze(1)
        above_N = reached_ND.gather(1, digit_N1).squeeze(1) - level_N
        start_N = start_N + (digit_N1.squeeze(1) << shift)
    return start_N, above_N, level_N, own_ND.gather(1, digit_N1).squeeze(1)


def _histogram(scaled: Tensor, mass: Tensor | None, start: Tensor, shift: int) -> Tensor:
    """Return a histogram (N, D) int64 of each row of logits.

    `order_of` maps a logit to an integer of the same order. Entry d is the weight of the tokens whose integer is in
    [start + (d << shift), start + ((d + 1) << shift)). A token weighs 1, or its mass in units of 2^-40.

    scaled: (N, L) float32, logits over the temperature.
    mass: (N, L) float32, exp(logit - max): 1 for the largest logit. None to count tokens.
    start: (N,) int64.
    """
    digit_NL = (order_of(scaled) - start.unsqueeze(1)) >> shift
    weight_NL = torch.ones_like(digit_NL) if mass is None else mass.double().mul_(2.0**40).long()
    # The first and last column collect values outside of the digit's range.
    weights_ND = digit_NL.new_zeros(len(scaled), (1 << DIGIT) + 2)
    weights_ND.scatter_add_(1, digit_NL.clamp_(-1, 1 << DIGIT).add_(1), weight_NL)
    return weights_ND[:, 1:-1].contiguous()


def _last_tie(scaled: Tensor, least: Tensor, kept: Tensor, own: Tensor) -> Tensor:
    """Return the index of the last kept tie of each row, (N,) int32; -1 if no tie is kept, L if all are.

    Ties are the values equal to `least`. There are `own` of them, and the first `kept` are kept, (N,) int64 each.
    """
    last_N = ((scaled == least.unsqueeze(1)).cumsum(-1) < kept.unsqueeze(1)).sum(-1)
    return last_N.where(kept > 0, -1).where(kept < own, scaled.shape[1]).int()


_KERNELS = "bateleur.eagle.kernels.vocab_shard"
HISTOGRAM = Implementations(_histogram, triton=f"{_KERNELS}:histogram_rows")
LAST_TIE = Implementations(_last_tie, triton=f"{_KERNELS}:last_tie_rows")
