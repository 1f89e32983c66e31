"""RMS norms: before every branch, over heads of queries and keys, and over elements that are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.models.operators import operator

Term = tuple[Tensor, float]
"""A tensor (T, size) to add to the stream, and its factor."""


def _fake_sum(
    h: Tensor, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    return h.new_empty(h.shape, dtype=dtype)


@operator("norm", lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format), native="rows")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, with the mean in float32.

    x (T, size); weight (size,) of x's dtype, or float32.
    """
    return _normed(x, weight, eps)


@operator("norm", _fake_sum, mutates=("h",), native="rows")
def add_rms_norm(
    h: Tensor, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add `factor * term` to h in place for one or two terms, in h's dtype, and return the RMS norm of h in `dtype`.

    h and terms (T, size); weight (size,) of `dtype`, or float32. Every sum is rounded, as if added one by one.
    """
    for term, factor in zip(terms, factors, strict=True):
        h.add_(term, alpha=factor)
    return _normed(h.to(dtype), weight, eps)


@operator("norm", mutates=("h",))
def add_normed(h: Tensor, y: Tensor, factor: float, weight: Tensor, eps: float) -> None:
    """Add `factor * rms_norm(y, weight, eps)` to h, in place and in h's dtype; h and y (T, size)."""
    h.add_(_normed(y, weight, eps), alpha=factor)


class RMSNorm:
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, with the mean in float32."""

    def __init__(self, size: int, eps: float, like: Tensor, *, exact: bool = False) -> None:
        """exact: the weight is float32, not of the model's dtype. like: tensor with the model's dtype and device."""
        self.weight = like.new_empty(size, dtype=torch.float32 if exact else like.dtype)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x, which is (T, size) in the layer's dtype."""
        return rms_norm(x, self.weight, self._eps)

    def of_sum(self, h: Tensor, terms: Sequence[Term], dtype: torch.dtype) -> Tensor:
        """Add `factor * y` to h (T, size) in place for one or two terms (y, factor). Return the norm in `dtype`."""
        added, factors = zip(*terms, strict=True)
        return add_rms_norm(h, added, factors, self.weight, self._eps, dtype)

    def add_to(self, h: Tensor, y: Tensor, factor: float) -> None:
        """Add `factor` times the norm of y to h in place, both (T, size)."""
        add_normed(h, y, factor, self.weight, self._eps)


class HeadNorm:
    """RMS norms over each head of queries and keys, with weights `q` and `k` (size,) float32."""

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self.q = like.new_empty(size, dtype=torch.float32)
        self.k = torch.empty_like(self.q)
        self._eps = eps

    @property
    def weights(self) -> tuple[Tensor, Tensor, float]:
        """Weights of queries and keys, and epsilon, as arguments of `AttentionBackend.attend`."""
        return self.q, self.k, self._eps

    def __call__(self, x: Tensor, queries: int) -> Tensor:
        """Return x (T, heads, size) normalised. The first `queries` heads are queries, the others are keys."""
        y = F.rms_norm(x, x.shape[-1:], None, self._eps)
        y[:, :queries].mul_(self.q)
        y[:, queries:].mul_(self.k)
        return y


class AllHeadsNorm(HeadNorm):
    """RMS norms over all query heads of a token and over all its key heads, with one weight per element."""

    def __init__(self, sizes: tuple[int, int], eps: float, like: Tensor) -> None:
        """sizes: elements of all query heads of a token, and of all its key heads."""
        self.q, self.k = (like.new_empty(size) for size in sizes)
        self._eps = eps

    def over_ranks(self, x: Tensor, queries: int, heads: tuple[int, int], ranks: Ranks) -> Tensor:
        """Return x (T, heads of this rank, size) normalised over the heads of all ranks.

        queries: number of query heads in x, which come before key heads. heads: query and key heads of the whole layer.
        Several ranks may have the same key heads.
        """
        parts = [part.flatten(1).float() for part in (x[:, :queries], x[:, queries:])]
        sizes = [count * x.shape[2] for count in heads]
        copies = [ranks.size * part.shape[1] // size for part, size in zip(parts, sizes, strict=True)]
        squares = torch.stack([part.square().sum(-1) / each for part, each in zip(parts, copies, strict=True)], 1)
        squares = ranks.sum_(squares)
        normed = [
            (part * (squares[:, i : i + 1] / sizes[i] + self._eps).rsqrt_()).to(x.dtype).mul_(weight)
            for i, (part, weight) in enumerate(zip(parts, (self.q, self.k), strict=True))
        ]
        return torch.cat(normed, 1).view(x.shape)

    def __call__(self, x: Tensor, queries: int) -> Tensor:
        """Return x (T, heads, size) normalised. The first `queries` heads are queries, the others are keys."""
        parts = zip((x[:, :queries], x[:, queries:]), (self.q, self.k), strict=True)
        return torch.cat([rms_norm(part.flatten(1), weight, self._eps) for part, weight in parts], 1).view(x.shape)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gated_norm_over_ranks(
    x_TI: Tensor,
    gate_TI: Tensor,
    weight: Tensor,
    of_groups: tuple[int, int],
    eps: float,
    norm_first: bool,
    ranks: Ranks,
) -> Tensor:
    """Return this rank's part (T, I) of the RMS norm over groups of elements, gated by SiLU. A group may span ranks.

    x_TI, gate_TI: this rank's elements, all of one group. weight (I,). of_groups: index of the group, and number of
    groups. norm_first: whether the norm comes before the gate.
    """
    gate, x = F.silu(gate_TI.float()), x_TI.float()
    y = x if norm_first else gate.mul_(x)
    group, groups = of_groups
    squares_TG = y.new_zeros(len(y), groups)
    squares_TG[:, group] = y.square().sum(-1)
    lanes = y.shape[1] * ranks.size // groups
    y = y * (ranks.sum_(squares_TG)[:, group : group + 1] / lanes + eps).rsqrt_()
    if norm_first:
        return gate.mul_(y.mul_(weight)).to(x_TI.dtype)
    return y.to(x_TI.dtype).mul_(weight)
