"""The delta rules of decodes, writing the state after each token. Shapes: `shared.delta_rule`, K draft tokens."""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import compute_dtype, load_slots, pad_rows, store_slots, unpad
from bateleur.mamba.ops.shared.delta_rule import (
    apply_state,
    by_row,
    by_token,
    corrected,
    gates,
    is_in_place,
    slot_range,
    units,
)


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
    """A delta rule over 1 to 1 + K tokens (K drafts) per row (request); writes the state after each to a state slot.

    With max_query_len 1 and as many tokens as rows, row r is token r: rows without a token come last, with slots 0.

    Args:
        write: (R, 1 + K) int64; the state after token i of row r is written to state[write[r, i]].
        max_query_len: maximum number of tokens of a row.
        The others: as in `delta_scan_varlen`.

    Returns o (T, H, Dv).
    """
    num_tokens, num_rows, heads, dtype = v.shape[0], read.shape[0], v.shape[1], compute_dtype(v)
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros_like(v)
    g, beta = gates(a, b, A, dt_bias, beta_scale, dtype)
    place, tokens, targets = None, None, write[:, :max_query_len]
    if num_tokens != max_query_len * num_rows or (max_query_len > 1 and not _all_have(query_start_loc, max_query_len)):
        tokens, place = pad_rows(query_start_loc, max_query_len, num_tokens)
        targets = torch.where(place < num_tokens, targets, 0)
    step = (num_rows, max_query_len, tokens)
    new = (units(q, k, heads, dtype), v.to(dtype), g, beta)
    kq, vs, g, beta = (by_row(x, *step) for x in new)
    decay = g.exp()
    total = g if max_query_len == 1 else g.cumsum(2)
    before, own = _before(state, read, targets, dtype)
    probes = kq * (decay if max_query_len == 1 else total.exp()).unsqueeze(3)
    y = apply_state(before, probes.flatten(2, 3))
    u, o = corrected(y, kq, total, vs, beta)
    k = kq.select(3, 0)
    for t in range(max_query_len):
        slots = slot_range(targets[:, t], any_step=True) if is_in_place(state, dtype) else None
        out = state[slots] if slots is not None else before if own else None
        before = torch.mul(before, decay.narrow(2, t, 1), out=out)
        before.addcmul_(u.select(2, t).unsqueeze(3), k.narrow(2, t, 1))
        own = slots is None
        if own:
            store_slots(state, targets[:, t], before)
    return by_token(o).to(v.dtype) if place is None else unpad(by_token(o), place.view(-1), v)


def _all_have(query_start_loc: Tensor, length: int) -> bool:
    """Return whether each request has `length` tokens; False if the tensor is not on a CPU."""
    if query_start_loc.device.type != "cpu":
        return False
    starts = query_start_loc.tolist()
    return bool(starts == list(range(0, len(starts) * length, length)))


def _before(state: Tensor, read: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return the initial states of the requests, in `dtype`, and whether they are copies.

    They are a view of `state` if the slots are a range, and no request writes its first state where another one reads.
    """
    run = slot_range(read) if is_in_place(state, dtype) else None
    if run is not None:
        slots, first = read.tolist(), targets[:, 0].tolist()
        if slots == first or not {*slots} & {*first}:
            return state[run], False
    return load_slots(state, read, dtype), True
