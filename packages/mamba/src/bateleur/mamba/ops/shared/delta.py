"""What the delta rules share: keys and queries of unit length, decays in log space, entries of their rings.

A value head's state S (Dv, Dk) decays by exp(g), loses what it holds under the key k and takes the corrected value u
there: S <- exp(g) S + u k^T with u = beta (v - exp(g) S k), and o = S q. The decay is one number for a head (the gated
delta rule, Yang, Kautz and Hatamizadeh, 2024), or one for each key channel (Kimi delta attention, Moonshot AI, 2025):
here the last axis of g has 1 or Dk entries, and nothing else differs.

Shapes: T tokens, R rows, M tokens of the longest row, H value heads, G key heads, Dk and Dv channels of a key and of a
value, L entries of a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.shared.rings import by_age

EPSILON = 1e-6
"""Under the root of a key's or a query's length."""


def units(q: Tensor, k: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Keys and, behind them, queries of all value heads, (T, H, 2, Dk): of length 1, the queries times Dk ** -0.5."""
    both = torch.stack((k, q), 2).to(dtype)
    factor = inverse_length(both)
    factor.select(2, 1).mul_(k.shape[-1] ** -0.5)
    return of_heads(both.mul_(factor), heads)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """(..., G, ...) with the key heads in dimension 1 to what each value head has of it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def inverse_length(x: Tensor) -> Tensor:
    """Of each vector, (..., 1)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().add_(EPSILON).rsqrt_()


def gates(
    a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, beta_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Raw a (T, H) or (T, H, Dk) and b (T, H) to g, (T, H, 1) or (T, H, Dk), and beta (T, H, 1)."""
    if a.dim() == 2:
        a, dt_bias = a.unsqueeze(2), dt_bias.unsqueeze(1)
    g = F.softplus(a.to(dtype) + dt_bias).mul_(A.unsqueeze(1))
    beta = b.to(dtype).sigmoid().unsqueeze(2)
    return g, beta if beta_scale == 1.0 else beta.mul_(beta_scale)


class Held(NamedTuple):
    """The entries of each row's ring, newest first."""

    keys: Tensor
    """(R, G, L) where a ring of k has them, as rows of (ring rows * L * G, Dk). On CPU, L is the fullest row's."""
    values: Tensor
    """(R, H, L) where those of u and g have them."""
    gone: Tensor | None
    """(R, 1, L, 1) bool: there is none, and what stands in its place is nobody's. None where all rows have L."""


def held(row: Tensor, start: Tensor, count: Tensor, capacity: int, heads: tuple[int, int]) -> Held:
    """`count` (R,) entries of each row; heads are (G, H)."""
    ages = by_age(row, start, count - 1, capacity)
    keys, values = (
        ages.at.unsqueeze(1) * each + torch.arange(each, device=row.device).unsqueeze(1) for each in heads
    )
    gone = ages.gone[:, 1:].unsqueeze(1)
    full = row.device.type == "cpu" and not gone.any()
    return Held(keys, values, None if full else gone)


def entries(ring: Tensor, at: Tensor, gone: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(R, heads, L, size) entries of a ring (rows, L, heads, ...), zeros where there is none."""
    table = ring.view(ring.shape[0] * ring.shape[1] * at.shape[1], -1)
    found: Tensor = torch.embedding(table, at).to(dtype)
    return found if gone is None else found.masked_fill_(gone, 0)


def decayed(ring_g: Tensor, of: Held, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is left of each entry, (R, H, L, 1 or Dk), and of the state under the ring, (R, H, 1, 1 or Dk)."""
    g = entries(ring_g, of.values, of.gone, dtype)
    left = F.pad(g, (0, 0, 1, 0)).cumsum(2).exp_()  # of what is as old as the place, and of all
    return left.narrow(2, 0, g.shape[2]), left.narrow(2, g.shape[2], 1)


def own_scores(kq: Tensor, total: Tensor) -> Tensor:
    """How much keys and queries take of the step's own tokens, (R, H, 2 M, M); without meaning for younger ones.

    kq (R, H, M, 2, Dk), total (R, H, M, 1 or Dk), the running sum of g.
    """
    keys = kq.select(3, 0)
    if keys.shape[2] == 1:
        return (kq * keys.unsqueeze(3)).sum(4).unsqueeze(4).flatten(2, 3)
    left = (total.unsqueeze(3) - total.unsqueeze(2)).exp_()  # (R, H, M, M, 1 or Dk)
    if left.shape[4] > 1:
        return torch.matmul(kq, (left * keys.unsqueeze(2)).mT).flatten(2, 3)
    scores: Tensor = torch.matmul(kq.flatten(2, 3), keys.mT).unflatten(2, (-1, 2))
    return scores.mul_(left.mT).flatten(2, 3)


def solve(y: Tensor, scores: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Corrected values and outputs, (R, H, M, Dv), of what the state before the step gives: y (R, H, 2 M, Dv).

    By forward substitution, token by token: nothing that a token gets depends on a younger one, even if that is not a
    number. scores (R, H, 2 M, M), v (R, H, M, Dv), beta (R, H, M, 1). y and scores are written to.
    """
    u, o = y[:, :, ::2], y[:, :, 1::2]
    torch.sub(v, u, out=u).mul_(beta)
    if v.shape[2] == 1:
        return u, o.addcmul_(scores[:, :, 1:], u)
    scores[:, :, ::2].mul_(beta.neg())
    for t in range(v.shape[2]):
        after = slice(2 * t + 1, None)  # the token's own query, and all that is younger
        y[:, :, after].addcmul_(scores[:, :, after, t : t + 1], u[:, :, t : t + 1])
    return u, o
