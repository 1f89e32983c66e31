"""Which tokens min_p, top_k and top_p leave of a vocabulary of which several ranks have a part each.

Every rank finds the same least that stays of a row, digit by digit: values are integers of the same order (`order_of`),
and for each of 256 ranges of them the ranks add up how many tokens it has, or their mass. So what goes round is
bounded whatever the vocabulary, and since these are sums of integers, nothing depends on who has which token. Of equal
logits the lowest ids stay: each rank finds out how many of its own do.

The mass of a token is exp(logit - max) in units of 2^-40, as in `bateleur.eagle.law`.

Legend for shapes: N rows of logits, L tokens of the part, D values of a digit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from bateleur.eagle import native
from bateleur.eagle.law import LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P, Law
from bateleur.eagle.part import Part, float_of, order_of
from bateleur.eagle.rules import tempered
from bateleur.metadata.forms import Forms, define

DIGIT = 8
"""Bits that a pass finds of the order of a float."""
_LEAST = torch.finfo(torch.float32).min


class _Found(NamedTuple):
    """A value of each row, (N,) int64 each: its order; the weight of what is above it, of what is equal to it, and of
    that in this part.
    """

    order: Tensor
    above: Tensor
    level: Tensor
    own_level: Tensor


class _Edge(NamedTuple):
    """What stays of each row, (N,) int64 each: the order of the least, how many that are equal to it stay of how many,
    and how many are in this part. These are 0 where none of them is to be dropped.
    """

    order: Tensor
    kept: Tensor
    ties: Tensor
    own: Tensor


def cut_part(logits: Tensor, law: Law, part: Part) -> tuple[Tensor, Tensor]:
    """`law.cut` of logits (N, L) of a part: the least over the temperature that stays, (N,) float32, on every rank the
    same; and the last place here that stays of those equal to it, (N,) int32, -1 if none does, and L if all do.
    """
    values, size = law.values, logits.shape[1]
    scaled_NL = tempered(logits.float(), values[:, TEMPERATURE])
    best_N = part.best(scaled_NL.amax(-1))
    # Nothing that is -inf is ever kept, so the floor is finite.
    least_N = (best_N + values[:, LOG_MIN_P]).clamp_min_(_LEAST)
    last_N = torch.full_like(least_N, size, dtype=torch.int32)
    if len(law.truncated(part.vocab_size)):
        nothing_N = torch.zeros_like(last_N, dtype=torch.int64)
        edge = _Edge(order_of(least_N), nothing_N, nothing_N, nothing_N)
        top_k = law.host[:, TOP_K]
        if ((top_k > 0) & (top_k < part.vocab_size)).any():
            edge = _top(scaled_NL, edge.order, values[:, TOP_K].long(), part)
        if (law.host[:, TOP_P] < 1).any():
            edge = _nucleus(scaled_NL, best_N, edge, values[:, TOP_P], part)
        least_N = float_of(edge.order)
        before_N = part.exchange.every(edge.own)[: part.exchange.rank].sum(0)
        kept_N = (edge.kept - before_N).clamp_min_(0).minimum(edge.own)
        last_N = _last_rows(scaled_NL, least_N, kept_N, edge.own)
    lawful_N = (values[:, TEMPERATURE] > 0) & best_N.isfinite()
    return least_N.where(lawful_N, -torch.inf), last_N.where(lawful_N, size)


def _top(scaled_NL: Tensor, floor_N: Tensor, top_k_N: Tensor, part: Part) -> _Edge:
    """The largest top_k of what is not below the floor."""
    size = part.vocab_size
    top_k_N = top_k_N.where((top_k_N > 0) & (top_k_N < size), size)
    found = _search(scaled_NL, None, floor_N, top_k_N.minimum, part)
    return _Edge(found.order, found.level.minimum(top_k_N - found.above), found.level, found.own_level)


def _nucleus(scaled_NL: Tensor, best_N: Tensor, edge: _Edge, top_p_N: Tensor, part: Part) -> _Edge:
    """What top_p leaves of what is there."""

    def mass_of(x: Tensor, best: Tensor) -> Tensor:
        return (x - best).exp_().double().mul_(2.0**40).long()

    # Ties of the edge that do not stay have no part in the mass.
    surplus_N = (edge.ties - edge.kept) * mass_of(float_of(edge.order), best_N)
    limit_N = torch.zeros_like(best_N, dtype=torch.float64)

    def goal(total_N: Tensor) -> Tensor:
        return limit_N.copy_((total_N - surplus_N).double() * top_p_N)

    mass_NL = (scaled_NL - best_N.unsqueeze(1)).exp_()
    found = _search(scaled_NL, mass_NL, edge.order, goal, part)
    unit_N = mass_of(float_of(found.order), best_N).clamp_min_(1)
    ties_N = found.level // unit_N
    most_N = ties_N.where((found.order != edge.order) | (edge.ties == 0), edge.kept)
    needed_N = ((limit_N - found.above.double()) / unit_N.double()).long()
    needed_N += (found.above + needed_N * unit_N).double() < limit_N
    kept_N = needed_N.clamp_min_(1).minimum(most_N)
    inner = _Edge(found.order, kept_N, ties_N, found.own_level // unit_N)
    return _Edge(*(one.where(top_p_N < 1, other) for one, other in zip(inner, edge, strict=True)))


def _search(
    scaled_NL: Tensor,
    mass_NL: Tensor | None,
    start_N: Tensor,
    goal: Callable[[Tensor], Tensor],
    part: Part,
) -> _Found:
    """The largest value, not below `start_N`, so that what is not below it reaches the goal, in tokens or in mass.

    goal: of all that is not below the start, (N,) int64.
    """
    above_N, goal_N1 = torch.zeros_like(start_N), None
    for shift in range(32 - DIGIT, -1, -DIGIT):
        own_ND = tally_rows(scaled_NL, mass_NL, start_N, shift)
        every_ND = part.exchange.sum_(own_ND.clone())
        # What is not below each value of the digit.
        reached_ND = every_ND.flip(1).cumsum(1).flip(1).add_(above_N.unsqueeze(1))
        if goal_N1 is None:
            goal_N1 = goal(reached_ND[:, 0]).double().unsqueeze(1)
        digit_N1 = (reached_ND.double() >= goal_N1).sum(1, keepdim=True).sub_(1).clamp_min_(0)
        level_N = every_ND.gather(1, digit_N1).squeeze(1)
        above_N = reached_ND.gather(1, digit_N1).squeeze(1) - level_N
        start_N = start_N + (digit_N1.squeeze(1) << shift)
    return _Found(start_N, above_N, level_N, own_ND.gather(1, digit_N1).squeeze(1))


def _tally(scaled: Tensor, mass: Tensor | None, start: Tensor, shift: int) -> Tensor:
    if native.takes(scaled):
        return native.tally_rows(scaled, mass, start, shift, 1 << DIGIT)
    digit_NL = (order_of(scaled) - start.unsqueeze(1)) >> shift
    weight_NL = torch.ones_like(digit_NL) if mass is None else mass.double().mul_(2.0**40).long()
    # In front and behind are those that no value of the digit has.
    weights_ND = digit_NL.new_zeros(len(scaled), (1 << DIGIT) + 2)
    weights_ND.scatter_add_(1, digit_NL.clamp_(-1, 1 << DIGIT).add_(1), weight_NL)
    return weights_ND[:, 1:-1].contiguous()


def _tally_fake(scaled: Tensor, mass: Tensor | None, start: Tensor, shift: int) -> Tensor:
    return start.new_empty(len(scaled), 1 << DIGIT)


def _last(scaled: Tensor, least: Tensor, kept: Tensor, own: Tensor) -> Tensor:
    if native.takes(scaled):
        return native.last_rows(scaled, least, kept, own)
    last_N = ((scaled == least.unsqueeze(1)).cumsum(-1) < kept.unsqueeze(1)).sum(-1)
    return last_N.where(kept > 0, -1).where(kept < own, scaled.shape[1]).int()


def _last_fake(scaled: Tensor, *_: Tensor) -> Tensor:
    return scaled.new_empty(len(scaled), dtype=torch.int32)


_library = Library("bateleur", "FRAGMENT")
TALLY = Forms(_tally, triton="bateleur.eagle.kernels.part:tally")
LAST = Forms(_last, triton="bateleur.eagle.kernels.part:last_rows")
tally_rows = define(_library, _tally, TALLY, mutates=(), fake=_tally_fake, name="tally_rows")
"""Of each row the weight of the values order = start + (d << shift) to start + ((d + 1) << shift) - 1, by the digit d,
(N, D) int64: how many tokens, or their mass (N, L) float32, 1 for the best.

scaled: (N, L) float32. start: (N,) int64."""
_last_rows = define(_library, _last, LAST, mutates=(), fake=_last_fake, name="last_rows")
"""The place of the last tie of each row that stays, (N,) int32: of `own` that are equal to `least` the first `kept`,
(N,) int64 each; -1 if none does, and L if all do."""
