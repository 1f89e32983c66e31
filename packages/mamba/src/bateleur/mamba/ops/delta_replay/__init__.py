"""Tokens of the delta rules over a state that stands still, and a ring of what was added to it since.

The ring keeps the corrected values u, so that the state under a token is a plain sum over it; those of a step's own
tokens are one unit lower triangular system. Shapes: as in `shared.delta`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import (
    by_content,
    compute,
    in_place,
    pad_rows,
    query_lens,
    run_of,
    store,
    unpad,
)
from bateleur.mamba.ops.shared.delta import (
    Held,
    by_row,
    by_token,
    corrected,
    decayed_keys,
    entries,
    gates,
    held,
    look,
    units,
)


class Places(NamedTuple):
    """Where a step finds and puts its tokens."""

    before: Held | None
    """The entries before the step; None where no row has any."""
    to: Tensor
    """(R * M,) entries of the flattened ring to write, row by row; entry 0 of row 0 where a row has fewer tokens."""
    longest: int
    """M"""
    tokens: Tensor | None = None
    """(R, M) token to read; some token where a row has fewer. None if each row has M, one row after the other."""
    targets: Tensor | None = None
    """(R * M,) token to write; T where a row has fewer."""


@by_content
def places(
    query_start_loc: Tensor | None,
    row: Tensor,
    start: Tensor,
    length: Tensor,
    num_tokens: int,
    max_query_len: int,
    capacity: int,
    key_heads: int,
    value_heads: int,
) -> Places:
    """Of a step of `query_start_loc`, or of one token in each row if that is None."""
    on_cpu = row.device.type == "cpu"
    empty = on_cpu and not length.any()
    before = None if empty else held(row, start, length, capacity, (key_heads, value_heads))
    first = (start + length).unsqueeze(1)
    if query_start_loc is None:
        return Places(before, (first % capacity).view(-1) + row * capacity, 1)
    longest = int(query_lens(query_start_loc).max()) if on_cpu else min(max_query_len, capacity)
    tokens, targets = pad_rows(query_start_loc, max(1, longest), num_tokens)
    rank = torch.arange(tokens.shape[1], device=row.device)
    to = torch.where(targets < num_tokens, (first + rank) % capacity + row.unsqueeze(1) * capacity, 0).view(
        -1
    )
    if on_cpu and targets.numel() == num_tokens and bool((targets < num_tokens).all()):
        return Places(before, to, longest)
    return Places(before, to, tokens.shape[1], tokens, targets.view(-1))


@operator(mutates=("ring_k", "ring_u", "ring_g"), like="v")
def delta_replay_update(
    state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    beta_scale: float,
) -> Tensor:
    """The same recurrence for few tokens per row, over a state that stays as it is and a ring of what came since.

    The state before a row's tokens is state[slot] advanced by ring_len entries of row `ring_row` of the rings:
    entry j lies at (ring_start + j) % L. The tokens are appended at ring_len and behind; the caller counts those that
    are accepted, and the next step overwrites the others, so that a rejected token never reaches a state.

    ring_k (ring rows, L, G, Dk) of k's dtype or a wider one, the raw key; ring_u (ring rows, L, H, Dv), the corrected
    value, and ring_g (ring rows, L, H) or (ring rows, L, H, Dk), the log decay, float32 (float64 for float64 inputs);
    contiguous. Row 0 of the rings is null, like slot 0: a row with ring_row 0 keeps nothing, and its output is
    unspecified. slot, ring_row, ring_start and ring_len (R,) int64; ring_len plus the row's tokens is at most L; no two
    rows share a ring row, except row 0. The other arguments as for `delta_state_update`. Returns o (T, H, Dv).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slot and ring row 0.
    """
    num_rows, num_tokens, heads, dtype = slot.shape[0], v.shape[0], v.shape[1], compute(v)
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(v)
    single = max_query_len == 1 and num_tokens == num_rows
    at = places(
        None if single else query_start_loc, ring_row, ring_start, ring_len, num_tokens, max_query_len,
        ring_k.shape[1], k.shape[1], heads,
    )  # fmt: skip
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    step = (num_rows, at.longest, at.tokens)
    kq, vs = by_row(units(q, k, heads, dtype), *step), by_row(v.to(dtype), *step)
    total = by_row(g, *step) if at.longest == 1 else by_row(g, *step).cumsum(2)
    probes = (kq * total.exp().unsqueeze(3)).flatten(2, 3)
    y = _seen(state, slot, probes, (ring_k, ring_u, ring_g), at.before)
    u, o = corrected(y, kq, total, vs, by_row(beta, *step))
    if at.tokens is not None:
        k, g = (x[at.tokens.view(-1)] for x in (k, g))
    for ring, values in ((ring_k, k), (ring_u, by_token(u)), (ring_g, g)):
        store(ring.view(-1, *ring.shape[2:]), at.to, values.view(-1, *ring.shape[2:]))
    return by_token(o).to(v.dtype) if at.targets is None else unpad(by_token(o), at.targets, v)


def _seen(
    state: Tensor, slot: Tensor, probes: Tensor, ring: tuple[Tensor, Tensor, Tensor], before: Held | None
) -> Tensor:
    """What keys and queries find in the state before the step, (R, H, 2 M, Dv), from probes (R, H, 2 M, Dk)."""
    (num_rows, heads, queries, size), dtype = probes.shape, probes.dtype
    of_ring = None
    if before is not None:
        ring_k, ring_u, ring_g = ring
        keys, factor, under = decayed_keys(ring_k, ring_g, before, dtype)
        scores = torch.bmm(probes.view(num_rows * keys.shape[1], -1, size), keys.flatten(0, 1).mT)
        of_ring = scores.view(num_rows, heads, queries, -1).mul_(factor.mT)
        values = entries(ring_u, before.values, before.gone, dtype)
        probes = probes * under
    run = run_of(slot) if in_place(state, dtype) else None
    base = state.index_select(0, slot).to(dtype) if run is None else state[run]
    y = look(base, probes)
    if run is None:
        y.masked_fill_((slot == 0).view(-1, 1, 1, 1), 0)
    return y if of_ring is None else y.add_(torch.matmul(of_ring, values))
