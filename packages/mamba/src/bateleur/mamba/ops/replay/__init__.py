"""Tokens over a state that stands still, and a ring of the inputs that came after it.

Shapes: as in `shared.rings`, and M new tokens of the longest row.
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
    query_lens,
    run_of,
    steps,
    store,
    unpad,
)
from bateleur.mamba.ops.shared.rings import Ages, by_age, by_group, decays, take


class Places(NamedTuple):
    """Where a step finds and puts its tokens."""

    ages: Ages
    """The step's tokens included."""
    queries: int
    """M: outputs to make in each row, those of the M newest entries."""
    younger: Tensor | None
    """(M, L, 1) bool: the entry came after the query. None for M = 1, where none did."""
    of_heads: Tensor
    """(R * M * H * L,) entries of each row, query and head in a table of (H, P) entries; a younger one than the query
    is not among them: the query's own stands there."""
    bags: Tensor
    """(R * M * H,) where those of each head begin."""
    to: Tensor
    """(R * M,) entries to write, newest first; some entry of row 0 where a row has fewer tokens."""
    tokens: Tensor | None = None
    """(R * M,) token to read; some token where a row has fewer. None if row r is token r."""
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
    heads: int,
    in_ring: bool,
) -> Places:
    """Of a step of `query_start_loc`, or of one token in each row if that is None.

    `in_ring`: the table of `of_heads` is the whole ring, else what `at` selects of it.
    """
    device, loc, queries, oldest = row.device, query_start_loc, 1, length
    if loc is not None:
        lens = query_lens(loc)
        queries = max(1, int(lens.max())) if device.type == "cpu" else min(max_query_len, capacity)
        oldest = length + lens - 1
    ages = by_age(row, start, oldest, capacity)
    num_rows, held = ages.at.shape
    entry = ages.at if in_ring else torch.arange(num_rows * held, device=device).view(num_rows, held)
    age, query = torch.arange(held, device=device), torch.arange(queries, device=device).unsqueeze(1)
    seen = entry[:, torch.maximum(age, query)].unsqueeze(2)  # (R, M, 1, L)
    of_heads = (seen * heads + torch.arange(heads, device=device).unsqueeze(1)).view(-1)
    bags = torch.arange(0, of_heads.shape[0], held, device=device)
    younger = (age < query).unsqueeze(2) if queries > 1 else None
    if loc is None:
        return Places(ages, queries, younger, of_heads, bags, ages.at.select(1, 0))
    tokens = loc[1:, None] - 1 - torch.arange(queries, device=device)
    there = tokens >= loc[:-1, None]
    to = torch.where(there, ages.at[:, :queries], 0).view(-1)
    targets = torch.where(there, tokens, num_tokens).view(-1)
    return Places(
        ages, queries, younger, of_heads, bags, to, tokens.clamp(0, num_tokens - 1).view(-1), targets
    )


@operator(mutates=("ring_x", "ring_dt", "ring_B"), like="x", native="ring")
def replay_update(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The same recurrence for few tokens per row, over a state that stays as it is and a ring of the inputs since.

    The state before a row's tokens is ssm_state[slot] advanced by ring_len entries of row `ring_row` of the rings:
    entry j lies at (ring_start + j) % L. The tokens are appended at ring_len and behind; the caller counts those that
    are accepted, and the next step overwrites the others, so that a rejected token never reaches a state.

    ring_x (ring rows, L, H, P) and ring_B (ring rows, L, G, N) of x's dtype or a wider one, ring_dt (ring rows, L, H)
    float32, the processed step (float64 for float64 inputs); contiguous. Row 0 of the rings is null, like slot 0: a row
    with ring_row 0 keeps nothing, and its output is unspecified. slot, ring_row, ring_start and ring_len (R,) int64;
    ring_len plus the row's tokens is at most L; no two rows share a ring row, except row 0. The other arguments as for
    `selective_state_update`. Returns y (T, H, P).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slot and ring row 0.
    """
    if not x.shape[0] or not slot.shape[0]:
        return torch.zeros_like(x)
    floats = ssm_state, ring_x, ring_dt, ring_B, x, dt, A, B, C, D, dt_bias
    rows = slot, ring_row, ring_start, ring_len
    return _by_age(*floats, query_start_loc, max_query_len, *rows, (dt_min, dt_max))


def _by_age(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    slot: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    limits: tuple[float, float],
) -> Tensor:
    """In torch's operators: outputs of the state under the ring, and what each query takes of each entry."""
    num_rows, num_tokens, (_, capacity, heads, channels) = slot.shape[0], x.shape[0], ring_x.shape
    dtype, groups = compute(x), B.shape[1]
    in_ring, single = in_place(ring_x, dtype), max_query_len == 1 and num_tokens == num_rows
    per_row = (None if single else query_start_loc, ring_row, ring_start, ring_len)
    ages, queries, younger, of_heads, bags, to, tokens, targets = places(
        *per_row, num_tokens, max_query_len, capacity, heads, in_ring
    )
    new: tuple[Tensor, ...] = (x, steps(dt, dt_bias, limits, dtype), B)
    if tokens is not None:
        new, C = tuple(values[tokens] for values in new), C[tokens]
    for ring, values in zip((ring_x, ring_dt, ring_B), new, strict=True):
        store(ring.view(-1, *ring.shape[2:]), to, values)
    Cs = by_group(C.to(dtype).reshape(num_rows, queries, -1), groups)
    scores = torch.bmm(Cs, by_group(take(ring_B, ages.at).to(dtype), groups).mT)  # (R * G, M, L)
    decay, weight = decays(ring_dt, ages, A, queries, dtype)
    weights = _taken(weight, scores, younger, D)
    table = (ring_x if in_ring else take(ring_x, ages.at).to(dtype)).view(-1, channels)
    y = torch.embedding_bag(table, of_heads, bags, False, 0, False, weights)[0]
    y = y.view(num_rows, queries, heads, channels).addcmul_(_seen(ssm_state, slot, Cs), decay.unsqueeze(3))
    if targets is None:
        return y.view(x.shape).to(x.dtype)
    return unpad(y.view(-1, heads, channels), targets, x)


def _taken(decay: Tensor, scores: Tensor, younger: Tensor | None, D: Tensor) -> Tensor:
    """What each query takes of each entry, (R * M * H * L,): decay (R, M, L, H), which is written to, scores, and D."""
    num_rows, groups = len(decay), len(scores) // len(decay)
    if groups == 1:
        decay.mul_(scores.unsqueeze(3))
    else:
        by_entry = scores.unflatten(0, (num_rows, groups)).permute(0, 2, 3, 1)
        decay.unflatten(3, (groups, -1)).mul_(by_entry.unsqueeze(4))
    if younger is None:
        decay.select(2, 0).add_(D)
    else:
        decay.masked_fill_(younger, 0).diagonal(dim1=1, dim2=2).add_(D.unsqueeze(1))
    return decay.transpose(2, 3).reshape(-1)


def _seen(ssm_state: Tensor, slot: Tensor, C: Tensor) -> Tensor:
    """The state under the ring as the queries see it, (R, M, H, P), from C (R * G, M, N)."""
    (_, heads, channels, size), num_rows, (batch, queries, _) = ssm_state.shape, slot.shape[0], C.shape
    run = run_of(slot) if in_place(ssm_state, C.dtype) else None
    state = ssm_state.index_select(0, slot).to(C.dtype) if run is None else ssm_state[run]
    # Rows times a matrix: on CPU ten times as fast as the matrix times a column.
    y = torch.bmm(C, state.view(batch, -1, size).mT)
    if batch > num_rows:
        y = y.view(num_rows, -1, *y.shape[1:]).transpose(1, 2).reshape(num_rows, queries, heads, channels)
    y = y.view(num_rows, queries, heads, channels)
    return y if run is not None else y.masked_fill_((slot == 0)[:, None, None, None], 0)
