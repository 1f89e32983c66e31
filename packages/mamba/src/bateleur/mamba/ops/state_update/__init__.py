"""The recurrence for few tokens a row, one rank of tokens at a time.

Shapes: R rows, H heads, G groups, P head channels, N state entries, M tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import all_long, compute, load, neighbours, pad_rows, steps, store, unpad


def _advance(state: Tensor, decay: Tensor, u: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """One token for each row, in place: (R, H, P, N) <- decay * state + u B^T; returns state C, (R, H, P).

    decay (R, H), u = dt * x (R, H, P), B and C (R, G, N).
    """
    num_rows, heads, channels, size = state.shape
    groups = B.shape[1]
    grouped = state.view(num_rows, groups, heads // groups, channels, size)
    state.mul_(decay[:, :, None, None])
    grouped.addcmul_(u.view(*grouped.shape[:-1], 1), B[:, :, None, None])
    # A row times a matrix: on CPU ten times as fast as the matrix times a column.
    flat = state.view(num_rows * groups, -1, size)
    return torch.bmm(C.reshape(-1, 1, size), flat.mT).view(num_rows, heads, channels)


@operator(mutates=("ssm_state",), like="x", native="update")
def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The same recurrence for 1 to 1 + K tokens per row, keeping the state after each of them.

    Arguments as for `ssd_scan_varlen`, and write (R, 1 + K): the state after token i of row r goes to
    ssm_state[write[r, i]]. max_query_len bounds the tokens of a row. Returns y (T, H, P).

    With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
    """
    num_tokens, num_rows, dtype = x.shape[0], read.shape[0], compute(x)
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(x)
    step = steps(dt, dt_bias, (dt_min, dt_max), dtype)
    decay = torch.exp(step * A)
    xs, Bs, Cs = x.to(dtype), B.to(dtype), C.to(dtype)
    u = xs * step[:, :, None]
    if max_query_len == 1 and num_tokens == num_rows:
        own = neighbours(ssm_state, read, write[:, 0], dtype)
        state = load(ssm_state, read, dtype) if own is None else own
        y = _advance(state, decay, u, Bs, Cs)
        if own is None:
            store(ssm_state, write[:, 0], state)
        return y.addcmul_(xs, D[:, None]).to(x.dtype)
    state = load(ssm_state, read, dtype)
    if all_long(query_start_loc, max_query_len, num_tokens):
        y = _by_rank(ssm_state, state, write[:, :max_query_len], decay, u, Bs, Cs)
        return y.addcmul_(xs, D[:, None]).to(x.dtype)
    tokens, place = pad_rows(query_start_loc, max_query_len, num_tokens)
    targets = torch.where(place < num_tokens, write[:, :max_query_len], 0)
    outputs = []
    for rank in range(max_query_len):
        # A row that has ended goes on with some token's data; its state and output then go nowhere.
        at = tokens[:, rank]
        outputs.append(_advance(state, decay[at], u[at], Bs[at], Cs[at]))
        store(ssm_state, targets[:, rank], state)
    y = torch.stack(outputs, 1).flatten(0, 1) + (xs * D[:, None])[tokens.view(-1)]
    return unpad(y, place.view(-1), x)


def _by_rank(
    ssm_state: Tensor, state: Tensor, write: Tensor, decay: Tensor, u: Tensor, B: Tensor, C: Tensor
) -> Tensor:
    """As many tokens of each row, one rank after the other, without padding: (T, H, P)."""
    ranks = (each.view(*write.shape, *each.shape[1:]).unbind(1) for each in (decay, u, B, C))
    outputs = []
    for target, *inputs in zip(write.unbind(1), *ranks, strict=True):
        outputs.append(_advance(state, *inputs))
        store(ssm_state, target, state)
    return torch.stack(outputs, 1).flatten(0, 1)
