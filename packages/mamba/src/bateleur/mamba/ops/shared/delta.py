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
    g = F.softplus(a.to(dtype) + dt_bias)
    g = g.mul_(A).unsqueeze(2) if a.dim() == 2 else g.mul_(A.unsqueeze(1))
    beta = b.to(dtype).sigmoid().unsqueeze(2)
    return g, beta if beta_scale == 1.0 else beta.mul_(beta_scale)


def by_row(x: Tensor, num_rows: int, longest: int, tokens: Tensor | None) -> Tensor:
    """(T, H, ...) to (R, H, M, ...): tokens are those of (R, M), or each row has M, one row after the other."""
    if tokens is not None:
        return x[tokens].transpose(1, 2)
    return x.unsqueeze(2) if longest == 1 else x.view(num_rows, longest, *x.shape[1:]).transpose(1, 2)


def by_token(x: Tensor) -> Tensor:
    """(R, H, M, ...) to (R * M, H, ...)."""
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


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


def decayed_keys(
    ring_k: Tensor, ring_g: Tensor, of: Held, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of each entry's key, as keys (R, G or H, L, Dk) times (R, H, L, 1), and of the state before it all.

    The latter is (R, H, 1, 1 or Dk).
    """
    keys, heads = entries(ring_k, of.keys, of.gone, dtype), of.values.shape[1]
    factor = of_heads(inverse_length(keys), heads)
    left = entries(ring_g, of.values, of.gone, dtype).cumsum(2).exp_()
    if left.shape[3] > 1:
        keys = of_heads(keys, heads)
    if (older := keys.shape[2] - 1) > 0:  # what each has of those behind it
        (keys if left.shape[3] > 1 else factor).narrow(2, 1, older).mul_(left.narrow(2, 0, older))
    return keys, factor, left.narrow(2, older, 1)


def look(state: Tensor, probes: Tensor) -> Tensor:
    """(R, H, 2 M, Dv): what probes (R, H, 2 M, Dk) find in states (R, H, Dv, Dk)."""
    flat, rows = state.flatten(0, 1), probes.flatten(0, 1)
    # For one token on CPU, the matrix times columns is twice as fast as rows times the matrix where states are in no
    # cache, as with many layers, and takes a fifth longer where they are; rows are faster for more tokens.
    y: Tensor = torch.bmm(flat, rows.mT).mT if rows.shape[1] == 2 else torch.bmm(rows, flat.mT)
    return y.view(*state.shape[:2], *y.shape[1:])


def corrected(y: Tensor, kq: Tensor, total: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Corrected values and outputs, (R, H, M, Dv), of what keys and queries find in the state before the step.

    By forward substitution, token by token: nothing that a token gets depends on a younger one, even if that is not a
    number. y (R, H, 2 M, Dv), which may be written to, kq (R, H, M, 2, Dk), total (R, H, M, 1 or Dk), the running sum
    of g, v (R, H, M, Dv), beta (R, H, M, 1).
    """
    if v.shape[2] == 1:
        (old, o), (k, q) = y.split(1, 2), kq.unbind(3)
        u = torch.sub(v, old).mul_(beta)
        return u, torch.addcmul(o, u, torch.linalg.vecdot(k, q).unsqueeze(3))
    scores = _own_scores(kq, total)
    u, o = y[:, :, ::2], y[:, :, 1::2]
    torch.sub(v, u, out=u).mul_(beta)
    scores[:, :, ::2].mul_(beta.neg())
    for t in range(v.shape[2]):
        after = slice(2 * t + 1, None)  # the token's own query, and all that is younger
        y[:, :, after].addcmul_(scores[:, :, after, t : t + 1], u[:, :, t : t + 1])
    return u, o


def _own_scores(kq: Tensor, total: Tensor) -> Tensor:
    """How much keys and queries take of the step's own tokens, (R, H, 2 M, M); without meaning for younger ones."""
    keys = kq.select(3, 0)
    left = (total.unsqueeze(3) - total.unsqueeze(2)).exp_()  # (R, H, M, M, 1 or Dk)
    if left.shape[4] > 1:
        return torch.matmul(kq, (left * keys.unsqueeze(2)).mT).flatten(2, 3)
    scores: Tensor = torch.matmul(kq.flatten(2, 3), keys.mT).unflatten(2, (-1, 2))
    return scores.mul_(left.mT).flatten(2, 3)
