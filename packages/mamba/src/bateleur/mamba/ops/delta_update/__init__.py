"""The delta rules for few tokens a row, one rank of tokens at a time.

Shapes: as in `shared.delta`, and M tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, load, neighbours, pad_rows, store, unpad
from bateleur.mamba.ops.shared.delta import gates, units


def _advance(state: Tensor, kq: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token for each row: state (R, H, Dv, Dk) in place; returns o (R, H, Dv).

    kq (R, H, 2, Dk), v (R, H, Dv), g (R, H, 1 or Dk), beta (R, H, 1).
    """
    num_rows, heads, lanes, size = state.shape
    decay = g.exp().unsqueeze(2)
    # The decayed state under key and query at once, read before it is written: o = S q = exp(g) S' q + u (k . q).
    flat = state.view(-1, lanes, size)
    seen = torch.bmm((kq * decay).view(-1, 2, size), flat.mT).view(num_rows, heads, 2, lanes)
    k, q = kq.unbind(2)
    u = torch.sub(v, seen.select(2, 0)).mul_(beta)
    state.mul_(decay).addcmul_(u.unsqueeze(3), k.unsqueeze(2))
    return torch.addcmul(seen.select(2, 1), u, (k * q).sum(2, keepdim=True))


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
    kq, vs = units(q, k, heads, dtype), v.to(dtype)
    if max_query_len == 1 and num_tokens == num_rows:
        own = neighbours(state, read, write[:, 0], dtype)
        carry = load(state, read, dtype) if own is None else own
        o = _advance(carry, kq, vs, g, beta)
        if own is None:
            store(state, write[:, 0], carry)
        return o.to(v.dtype)
    carry = load(state, read, dtype)
    tokens, place = pad_rows(query_start_loc, max_query_len, num_tokens)
    targets = torch.where(place < num_tokens, write[:, :max_query_len], 0)
    outputs = []
    for rank in range(max_query_len):
        # A row that has ended goes on with some token's data; its state and output then go nowhere.
        at = tokens[:, rank]
        outputs.append(_advance(carry, kq[at], vs[at], g[at], beta[at]))
        store(state, targets[:, rank], carry)
    return unpad(torch.stack(outputs, 1).flatten(0, 1), place.view(-1), v)
