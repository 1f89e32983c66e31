"""Helpers of the torch forms of the delta rules: normalized keys and queries, log decays, ring entries.

The state S (Dv, Dk) of a value head is updated as S <- exp(g) S + u k^T, with the corrected value u = beta (v - exp(g)
S k) and the output o = S q. The gated delta rule (Yang, Kautz and Hatamizadeh, 2024) has one decay per head, and Kimi
delta attention (Moonshot AI, 2025) one per key channel. The last dimension of g is therefore 1 or Dk.

Shapes: T tokens, R rows (requests), M tokens of the longest row, H value heads, G key heads, Dk and Dv channels of a
key and of a value, L entries of a ring.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.shared.mamba2_ring import ring_indices

EPSILON = 1e-6
"""Added to the squared length of keys and queries before the root."""


def units(q: Tensor, k: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return normalized keys and queries (tokens, value heads, 2, Dk); queries are scaled by Dk ** -0.5."""
    both = torch.stack((k, q), 2).to(dtype)
    factor = inverse_length(both)
    factor.select(2, 1).mul_(k.shape[-1] ** -0.5)
    return of_heads(both.mul_(factor), heads)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the key heads (dimension 1 of `x`), so that each of `heads` value heads has one."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def inverse_length(x: Tensor) -> Tensor:
    """Return 1 / length of each vector (last dimension), (..., 1)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().add_(EPSILON).rsqrt_()


def gates(
    a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, beta_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return log decays (tokens, heads, 1 or key channels) and beta (tokens, heads, 1) from the raw a and b."""
    g = F.softplus(a.to(dtype) + dt_bias)
    g = g.mul_(A).unsqueeze(2) if a.dim() == 2 else g.mul_(A.unsqueeze(1))
    beta = b.to(dtype).sigmoid().unsqueeze(2)
    return g, beta if beta_scale == 1.0 else beta.mul_(beta_scale)


def by_row(x: Tensor, num_rows: int, longest: int, tokens: Tensor | None) -> Tensor:
    """Rearrange (tokens, heads, ...) to (rows, heads, longest, ...) by the token indices (rows, longest).

    tokens: None if all rows have `longest` tokens."""
    if tokens is not None:
        return x[tokens].transpose(1, 2)
    return x.unsqueeze(2) if longest == 1 else x.view(num_rows, longest, *x.shape[1:]).transpose(1, 2)


def by_token(x: Tensor) -> Tensor:
    """Rearrange (rows, heads, tokens per row, ...) to (tokens, heads, ...)."""
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


class RingEntries(NamedTuple):
    """Indices of the L newest ring entries of each request. L: capacity; on a CPU, length of the longest ring."""

    keys: Tensor
    """(R, G, L) indices in the ring of k, viewed as (ring rows * L * G, Dk)."""
    values: Tensor
    """(R, H, L) indices in the rings of u and g, viewed in the same way."""
    missing: Tensor | None
    """(R, 1, L, 1) bool, the entry is missing. None if every row has L entries."""


def ring_entries(row: Tensor, start: Tensor, count: Tensor, capacity: int, heads: tuple[int, int]) -> RingEntries:
    """Return the indices of the `count` (R,) entries of each request's ring; heads: key heads, value heads."""
    ages = ring_indices(row, start, count - 1, capacity)
    keys, values = (ages.at.unsqueeze(1) * each + torch.arange(each, device=row.device).unsqueeze(1) for each in heads)
    missing = ages.missing[:, 1:].unsqueeze(1)
    full = row.device.type == "cpu" and not missing.any()
    return RingEntries(keys, values, None if full else missing)


def take(ring: Tensor, entries: Tensor, missing: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the entries (requests, heads, L, size) of rings (rows, L, heads, ...); zeros for missing ones."""
    table = ring.view(ring.shape[0] * ring.shape[1] * entries.shape[1], -1)
    found: Tensor = torch.embedding(table, entries).to(dtype)
    return found if missing is None else found.masked_fill_(missing, 0)


def decayed_keys(
    ring_k: Tensor, ring_g: Tensor, entries: RingEntries, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decayed keys of L ring entries as two factors, and the decay of the saved state.

    A decayed key is a key times the decays of later entries: the first factor (requests, key or value heads, L, Dk)
    times the second (requests, value heads, L, 1). The decay is (requests, value heads, 1, 1 or Dk).
    """
    keys, heads = take(ring_k, entries.keys, entries.missing, dtype), entries.values.shape[1]
    factor = of_heads(inverse_length(keys), heads)
    left = take(ring_g, entries.values, entries.missing, dtype).cumsum(2).exp_()
    if left.shape[3] > 1:
        keys = of_heads(keys, heads)
    if (older := keys.shape[2] - 1) > 0:  # each entry decays by the g of the later ones
        (keys if left.shape[3] > 1 else factor).narrow(2, 1, older).mul_(left.narrow(2, 0, older))
    return keys, factor, left.narrow(2, older, 1)


def apply_state(state: Tensor, probes: Tensor) -> Tensor:
    """Multiply states with the keys and queries of M tokens, (requests, heads, 2 M, channels)."""
    flat, rows = state.flatten(0, 1), probes.flatten(0, 1)
    # For one token on a CPU, matrix times columns is twice as fast as rows times matrix if the states are not in cache.
    # For more tokens, rows times matrix is faster.
    y: Tensor = torch.bmm(flat, rows.mT).mT if rows.shape[1] == 2 else torch.bmm(rows, flat.mT)
    return y.view(*state.shape[:2], *y.shape[1:])


def corrected(y: Tensor, kq: Tensor, total: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return corrected values and outputs of M tokens per request (R) and head (H), (R, H, M, Dv) each.

    Solved by forward substitution, token by token, so no token depends on a later one, even if that is NaN.

    Args:
        y: (R, H, 2 M, Dv) products of keys and queries with the state before the step; overwritten.
        kq: (R, H, M, 2, Dk) keys and queries.
        total: (R, H, M, 1 or Dk) running sum of the log decay.
        v: (R, H, M, Dv) values.
        beta: (R, H, M, 1).
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
        after = slice(2 * t + 1, None)  # its own query, and all later tokens
        y[:, :, after].addcmul_(scores[:, :, after, t : t + 1], u[:, :, t : t + 1])
    return u, o


def _own_scores(kq: Tensor, total: Tensor) -> Tensor:
    """Return decayed products of M tokens' keys and queries with their keys, (requests, heads, 2 M, M)."""
    keys = kq.select(3, 0)
    left = (total.unsqueeze(3) - total.unsqueeze(2)).exp_()  # (R, H, M, M, 1 or Dk)
    if left.shape[4] > 1:
        return torch.matmul(kq, (left * keys.unsqueeze(2)).mT).flatten(2, 3)
    scores: Tensor = torch.matmul(kq.flatten(2, 3), keys.mT).unflatten(2, (-1, 2))
    return scores.mul_(left.mT).flatten(2, 3)


def is_in_place(state: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `state` is contiguous and of `dtype`, so that views of it are updated without copies."""
    return state.dtype == dtype and state.is_contiguous()


def slot_range(slots: Tensor, *, any_step: bool = False) -> slice | None:
    """Return state slots as a slice if on a CPU, without 0, and consecutive (with `any_step`: equally spaced).

    Otherwise None; other devices would have to synchronize. A view of the slice saves a copy of all states: 16 MiB for
    64 rows of 256 KiB.
    """
    if slots.device.type != "cpu":
        return None
    values = slots.tolist()
    step = values[1] - values[0] if any_step and len(values) > 1 else 1
    if values[0] == 0 or step <= 0 or values != list(range(values[0], values[-1] + 1, step)):
        return None
    return slice(values[0], values[-1] + 1, step)
