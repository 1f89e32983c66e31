"""Replay and fold in vectorised torch: a state that stands still, and a ring of the inputs that came after it.

No loop over requests and no synchronisation with the device.

Shapes: T tokens, R rows, H heads, G groups, J = H / G heads per group, P head channels, N state entries, L entries of a
ring, M new tokens of the longest row. Entries are taken by age, 0 being the newest: then every row ends at the same
place however full its ring is, and whatever the ring held before is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops._ring import Ages, folds, places
from bateleur.mamba.ops._rows import compute, in_place, load, run_of, steps, store, unpad


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
    """Append the tokens to the ring; then each sees the ring's entries up to itself, and the state under them."""
    num_rows, num_tokens, (_, capacity, heads, channels) = slot.shape[0], x.shape[0], ring_x.shape
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(x)
    dtype, groups = compute(x), B.shape[1]
    in_ring, single = in_place(ring_x, dtype), max_query_len == 1 and num_tokens == num_rows
    per_row = (None if single else query_start_loc, ring_row, ring_start, ring_len)
    ages, queries, younger, of_heads, bags, to, tokens, targets = places(
        *per_row, num_tokens, max_query_len, capacity, heads, in_ring
    )
    new: tuple[Tensor, ...] = (x, steps(dt, dt_bias, (dt_min, dt_max), dtype), B)
    if tokens is not None:
        new, C = tuple(values[tokens] for values in new), C[tokens]
    for ring, values in zip((ring_x, ring_dt, ring_B), new, strict=True):
        store(ring.view(-1, *ring.shape[2:]), to, values)
    Cs = _by_group(C.to(dtype).reshape(num_rows, queries, -1), groups)
    scores = torch.bmm(Cs, _by_group(_take(ring_B, ages.at).to(dtype), groups).mT)  # (R * G, M, L)
    decay, weight = _decays(ring_dt, ages, A, queries, dtype)
    if groups == 1:
        weight.mul_(scores.unsqueeze(3))
    else:
        by_entry = scores.unflatten(0, (num_rows, groups)).permute(0, 2, 3, 1)
        weight.unflatten(3, (groups, -1)).mul_(by_entry.unsqueeze(4))
    if younger is None:
        weight.select(2, 0).add_(D)
    else:
        weight.masked_fill_(younger, 0).diagonal(dim1=1, dim2=2).add_(D.unsqueeze(1))
    table = (ring_x if in_ring else _take(ring_x, ages.at).to(dtype)).view(-1, channels)
    weights = weight.transpose(2, 3).reshape(-1)
    y = torch.embedding_bag(table, of_heads, bags, False, 0, False, weights)[0]
    y = y.view(num_rows, queries, heads, channels).addcmul_(_seen(ssm_state, slot, Cs), decay.unsqueeze(3))
    if targets is None:
        return y.view(x.shape).to(x.dtype)
    return unpad(y.view(-1, heads, channels), targets, x)


def fold_ring(
    ssm_state: Tensor,
    conv_state: Tensor,
    live: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    conv_offset: Tensor,
) -> None:
    """Layer by layer: see `_fold_layer`."""
    if dst.device.type == "cpu" and not any(dst.tolist()):
        return
    sizes = (ring_x.shape[2], live.shape[2], conv_state.shape[2])
    ages, src, dst, window = folds(ring_row, ring_start, count, src, dst, conv_offset, *sizes)
    layers = zip(ssm_state, conv_state, live, ring_x, ring_dt, ring_B, A, strict=True)
    for ssm, conv, windows, x, step, B, a in layers:
        store(conv, dst, torch.embedding(windows.view(-1, windows.shape[2]), window))
        _fold_layer(ssm, x, step, B, a, ages, src, dst)


def _fold_layer(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ages: Ages,
    src: Tensor,
    dst: Tensor,
) -> None:
    """Decay the state over all entries, and add each one's outer product, decayed over those after it."""
    (_, _, heads, channels), dtype, groups = ring_x.shape, compute(ring_dt), ring_B.shape[2]
    decay, weight = _decays(ring_dt, ages, A, 1, dtype)
    decay = decay.view(-1, heads, 1, 1)
    u = _take(ring_x, ages.at).to(dtype).unflatten(2, (heads, channels)) * weight.view(
        *ages.at.shape, heads, 1
    )
    u = _by_group(u.flatten(2), groups).mT
    Bs = _by_group(_take(ring_B, ages.at).to(dtype), groups)
    a, b = (run_of(src), run_of(dst)) if in_place(ssm_state, dtype) else (None, None)
    if a is not None and b is not None and (a == b or a.stop <= b.start or b.stop <= a.start):
        state = torch.mul(ssm_state[a], decay, out=ssm_state[b])
        state.view(len(u), -1, Bs.shape[2]).baddbmm_(u, Bs)
    else:
        state = load(ssm_state, src, dtype).mul_(decay)
        state.view(len(u), -1, Bs.shape[2]).baddbmm_(u, Bs)
        store(ssm_state, dst, state)


def _take(ring: Tensor, at: Tensor) -> Tensor:
    """(R, L, size) entries of a ring."""
    entries: Tensor = torch.embedding(ring.view(-1, ring.shape[2:].numel()), at)
    return entries


def _by_group(entries: Tensor, groups: int) -> Tensor:
    """(R, L, G * size) to (R * G, L, size)."""
    if groups == 1:
        return entries
    return entries.view(*entries.shape[:2], groups, -1).transpose(1, 2).flatten(0, 1)


def _decays(
    ring_dt: Tensor, ages: Ages, A: Tensor, queries: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """How much is left of the state under the ring at each query, (R, M, H), and of each entry, (R, M, L, H).

    Query m is the token of age m. The latter times the entry's step; 0 where there is no entry, and without meaning
    where it is younger than the query.
    """
    step = _take(ring_dt, ages.after).to(dtype).masked_fill_(ages.gone, 0)  # (R, 1 + L, H)
    held = step.shape[1] - 1
    own = step.narrow(1, 1, held)
    if queries == 1:
        decay = (step.cumsum(1) * A).exp_()  # of what is younger than each entry, and than all
        return decay.narrow(1, held, 1), (decay.narrow(1, 0, held) * own).unsqueeze(1)
    # Summed from the oldest on, so that no query depends on a younger token, even if that is not a number.
    total = own.flip(1).cumsum(1).flip(1)
    at_query = total.narrow(1, 0, queries)
    decay = ((at_query.unsqueeze(2) - total.unsqueeze(1)) * A).exp_()
    return (at_query * A).exp_(), decay * own.unsqueeze(1)


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
