"""What the delta rules share: keys and queries of unit length, decays in log space, entries of their rings.

A value head's state S (Dv, Dk) decays by exp(g), loses what it holds under the key k and takes the corrected value u
there: S <- exp(g) S + u k^T with u = beta (v - exp(g) S k), and o = S q. The decay is one number for a head (the gated
delta rule, Yang, Kautz and Hatamizadeh, 2024), or one for each key channel (Kimi delta attention, Moonshot AI, 2025):
here the last axis of g has 1 or Dk entries, and nothing else differs.

Shapes: T tokens, R rows, H value heads, G key heads, J = H / G value heads of a key head, Dk and Dv channels of a key
and of a value, L entries of a ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.shared.rings import Ages

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


def entries(ring: Tensor, at: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(R, heads, L, size) of a ring (rows, L, ...), whose entries lie at `at` (R, L) of the flattened ring."""
    index = at.unsqueeze(1) * heads + torch.arange(heads, device=at.device).view(-1, 1)
    found: Tensor = torch.embedding(ring.view(-1, ring.shape[2:].numel() // heads), index)
    return found.to(dtype)


def decayed(ring_g: Tensor, ages: Ages, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is left of each entry, (R, H, L, 1 or Dk), and of the state under the ring, (R, H, 1, 1 or Dk).

    Of an entry that is not there something finite is left.
    """
    g = entries(ring_g, ages.after, heads, dtype).masked_fill_(ages.gone.unsqueeze(1), 0)
    left = g.cumsum(2).exp_()  # of what is as old as the place, and of all
    held = left.shape[2] - 1
    return left.narrow(2, 0, held), left.narrow(2, held, 1)
