"""The delta rules for few tokens a row, keeping the state after each. Shapes: as in `shared.delta`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, in_place, load, pad_rows, run_of, spaced, store, unpad
from bateleur.mamba.ops.shared.delta import gates, own_scores, solve, units


@operator(mutates=("state",), like="v")
def delta_state_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    write: Tensor,
    beta_scale: float,
) -> Tensor:
    """The same recurrence for 1 to 1 + K tokens per row, keeping the state after each of them.

    Arguments as for `delta_scan_varlen`, and write (R, 1 + K): the state after token i of row r goes to
    state[write[r, i]]. max_query_len bounds the tokens of a row. Returns o (T, H, Dv).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    num_tokens, num_rows, heads, dtype = v.shape[0], read.shape[0], v.shape[1], compute(v)
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(v)
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    new, place, targets = (units(q, k, heads, dtype), v.to(dtype), g, beta), None, write[:, :max_query_len]
    if max_query_len * num_rows == num_tokens and (
        max_query_len == 1 or _even(query_start_loc, max_query_len)
    ):
        kq, vs, g, beta = (x.view(num_rows, max_query_len, *x.shape[1:]) for x in new)
    else:
        tokens, place = pad_rows(query_start_loc, max_query_len, num_tokens)
        targets = torch.where(place < num_tokens, targets, 0)
        kq, vs, g, beta = (x[tokens] for x in new)
    kq, g = kq.transpose(1, 2), g.transpose(1, 2)  # (R, H, M, ...), and so below
    total = g.cumsum(2) if max_query_len > 1 else g
    before = _before(state, read, targets, dtype)
    flat = before.flatten(0, 1)
    probes = (kq * total.exp().unsqueeze(3)).reshape(len(flat), -1, flat.shape[2])
    # Rows times a matrix: on CPU ten times as fast as the matrix times a column.
    y = torch.bmm(probes, flat.mT).view(num_rows, heads, probes.shape[1], -1)
    u, o = solve(y, own_scores(kq, total), vs.transpose(1, 2), beta.transpose(1, 2))
    _advance(state, before, targets, kq.select(3, 0), u, g)
    o = o.transpose(1, 2)
    return o.reshape(v.shape).to(v.dtype) if place is None else unpad(o.flatten(0, 1), place.view(-1), v)


def _even(query_start_loc: Tensor, length: int) -> bool:
    """Whether each row has `length` tokens, as far as a host can see."""
    if query_start_loc.device.type != "cpu":
        return False
    starts = query_start_loc.tolist()
    return bool(starts == list(range(0, len(starts) * length, length)))


def _before(state: Tensor, read: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """The states that rows begin with, (R, H, Dv, Dk): as a view, if none writes its first where another reads."""
    run = run_of(read) if in_place(state, dtype) else None
    if run is not None:
        slots, first = read.tolist(), targets[:, 0].tolist()
        if slots == first or not {*slots} & {*first}:
            return state[run]
    return load(state, read, dtype)


def _advance(state: Tensor, before: Tensor, targets: Tensor, k: Tensor, u: Tensor, g: Tensor) -> None:
    """The state after each token, made where it is kept if that is a view.

    before (R, H, Dv, Dk), targets (R, M), k (R, H, M, Dk), u (R, H, M, Dv), g (R, H, M, 1 or Dk).
    """
    carry, decay, own = before, g.exp(), not _shares(before, state)
    for t in range(targets.shape[1]):
        slots = spaced(targets[:, t]) if in_place(state, carry.dtype) else None
        place = state[slots] if slots is not None else carry if own else None
        carry = torch.mul(carry, decay[:, :, t : t + 1], out=place)
        carry.addcmul_(u[:, :, t].unsqueeze(3), k[:, :, t].unsqueeze(2))
        own = slots is None
        if own:
            store(state, targets[:, t], carry)


def _shares(x: Tensor, state: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()
