"""The delta rules of decodes under FOLD: from a saved state and a ring of later tokens, without writing a state.

The ring stores the corrected values u, so the state before a token is a plain sum over the ring. The corrected values
of the new tokens are the solution of a unit lower triangular system. Shapes: as in `shared.delta_rule`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import cached_on_cpu, compute_dtype, pad_rows, query_lens, store_slots, unpad
from bateleur.mamba.ops.shared.delta_rule import (
    RingEntries,
    apply_state,
    by_row,
    by_token,
    corrected,
    decayed_keys,
    gates,
    is_in_place,
    ring_entries,
    slot_range,
    take,
    units,
)


class _TokenIndices(NamedTuple):
    """Index tensors that gather the ring entries and tokens of a step and scatter its results."""

    before: RingEntries | None
    """Ring entries before the step; None if all rings are empty."""
    write: Tensor
    """(R * M,) entries of the flattened ring to write, row by row; entry 0 of row 0 if a row has fewer tokens."""
    longest: int
    """M."""
    tokens: Tensor | None = None
    """(R, M) tokens to read; any token if a row has fewer. None if each row has M tokens."""
    targets: Tensor | None = None
    """(R * M,) tokens to write; T if a row has fewer. None if each row has M tokens."""


@cached_on_cpu
def _token_indices(
    query_start_loc: Tensor | None,
    row: Tensor,
    start: Tensor,
    length: Tensor,
    num_tokens: int,
    max_query_len: int,
    capacity: int,
    key_heads: int,
    value_heads: int,
) -> _TokenIndices:
    """Compute the indices of a step; `query_start_loc` is None if each row has one token."""
    on_cpu = row.device.type == "cpu"
    empty = on_cpu and not length.any()
    before = None if empty else ring_entries(row, start, length, capacity, (key_heads, value_heads))
    first = (start + length).unsqueeze(1)
    if query_start_loc is None:
        return _TokenIndices(before, (first % capacity).view(-1) + row * capacity, 1)
    longest = int(query_lens(query_start_loc).max()) if on_cpu else min(max_query_len, capacity)
    tokens, targets = pad_rows(query_start_loc, max(1, longest), num_tokens)
    rank = torch.arange(tokens.shape[1], device=row.device)
    entries = (first + rank) % capacity + row.unsqueeze(1) * capacity
    write = torch.where(targets < num_tokens, entries, 0).view(-1)
    if on_cpu and targets.numel() == num_tokens and bool((targets < num_tokens).all()):
        return _TokenIndices(before, write, longest)
    return _TokenIndices(before, write, tokens.shape[1], tokens, targets.view(-1))


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
    """A delta rule over 1 to 1 + K tokens (K drafts) per row (request), from a saved state and a ring of later tokens.

    The state before a row's tokens is state[slot] updated with ring_len entries of ring `ring_row`. Entry j is at
    (ring_start + j) % L. The row's tokens are appended to the ring. The caller counts the accepted ones, and the next
    step overwrites the others, so a rejected token never reaches a state.

    With max_query_len 1 and as many tokens as rows, row r is token r: rows without a token must come last, with slot
    and ring row 0.

    Args:
        ring_k: (ring rows, L entries, G key heads, Dk) raw keys, contiguous, in the dtype of k or a wider one.
        ring_u: (ring rows, L, H value heads, Dv) corrected values, contiguous, float32 (float64 for float64 inputs).
        ring_g: (ring rows, L, H) or (ring rows, L, H, Dk) log decays, contiguous, in the dtype of ring_u.
        slot, ring_row, ring_start, ring_len: (R,) int64. ring_len plus the row's tokens is at most L. No two rows share
            a ring row, except row 0, which is null: its rows store nothing, and their outputs are unspecified.
        The others: as in `delta_state_update`.

    Returns o (T, H, Dv).
    """
    num_rows, num_tokens, heads, dtype = slot.shape[0], v.shape[0], v.shape[1], compute_dtype(v)
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(v)
    single = max_query_len == 1 and num_tokens == num_rows
    at = _token_indices(
        None if single else query_start_loc, ring_row, ring_start, ring_len, num_tokens, max_query_len,
        ring_k.shape[1], k.shape[1], heads,
    )  # fmt: skip
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    step = (num_rows, at.longest, at.tokens)
    kq, vs = by_row(units(q, k, heads, dtype), *step), by_row(v.to(dtype), *step)
    total = by_row(g, *step) if at.longest == 1 else by_row(g, *step).cumsum(2)
    probes = (kq * total.exp().unsqueeze(3)).flatten(2, 3)
    y = _before_step(state, slot, probes, (ring_k, ring_u, ring_g), at.before)
    u, o = corrected(y, kq, total, vs, by_row(beta, *step))
    if at.tokens is not None:
        k, g = (x[at.tokens.view(-1)] for x in (k, g))
    for ring, values in ((ring_k, k), (ring_u, by_token(u)), (ring_g, g)):
        store_slots(ring.view(-1, *ring.shape[2:]), at.write, values.view(-1, *ring.shape[2:]))
    return by_token(o).to(v.dtype) if at.targets is None else unpad(by_token(o), at.targets, v)


def _before_step(
    state: Tensor, slot: Tensor, probes: Tensor, ring: tuple[Tensor, Tensor, Tensor], before: RingEntries | None
) -> Tensor:
    """Multiply the states before the step with the keys and queries of M tokens, (requests, heads, 2 M, channels)."""
    (num_rows, heads, queries, size), dtype = probes.shape, probes.dtype
    of_ring = None
    if before is not None:
        ring_k, ring_u, ring_g = ring
        keys, factor, under = decayed_keys(ring_k, ring_g, before, dtype)
        scores = torch.bmm(probes.view(num_rows * keys.shape[1], -1, size), keys.flatten(0, 1).mT)
        of_ring = scores.view(num_rows, heads, queries, -1).mul_(factor.mT)
        values = take(ring_u, before.values, before.missing, dtype)
        probes = probes * under
    run = slot_range(slot) if is_in_place(state, dtype) else None
    base = state.index_select(0, slot).to(dtype) if run is None else state[run]
    y = apply_state(base, probes)
    if run is None:
        y.masked_fill_((slot == 0).view(-1, 1, 1, 1), 0)
    return y if of_ring is None else y.add_(torch.matmul(of_ring, values))
