"""The Mamba-2 recurrence of decodes, token by token, writing the state after each token.

Shapes: T tokens, R rows (requests), H heads, G groups, P head channels, N state entries, K draft tokens.
"""

import torch
from torch import Tensor

from bateleur.mamba.ops.custom_op import operator
from bateleur.mamba.ops.shared import compute_dtype, load_slots, pad_rows, step_sizes, store_slots, unpad


@operator(mutates=("ssm_state",), like="x", native="mamba2")
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
    """The Mamba-2 recurrence of 1 to 1 + K tokens (K drafts) per row (request); writes each state to a state slot.

    Args:
        write: (R, 1 + K) int64; the state after token i of row r is written to ssm_state[write[r, i]].
        max_query_len: maximum number of tokens of a row.
        The others: as in `ssd_scan_varlen`.

    Returns y (T, H, P).
    """
    num_tokens, dtype = x.shape[0], compute_dtype(x)
    if num_tokens == 0 or read.shape[0] == 0:
        return torch.zeros_like(x)
    step = step_sizes(dt, dt_bias, (dt_min, dt_max), dtype)
    decay = torch.exp(step * A)
    xs, Bs, Cs = x.to(dtype), B.to(dtype), C.to(dtype)
    u = xs * step[:, :, None]
    state = load_slots(ssm_state, read, dtype)
    tokens, targets = pad_rows(query_start_loc, max_query_len, num_tokens)
    slots = torch.where(targets < num_tokens, write[:, :max_query_len], 0)
    outputs = []
    for i in range(max_query_len):
        # A row that has ended computes with another token's inputs; its state and output are dropped.
        at = tokens[:, i]
        outputs.append(_advance(state, decay[at], u[at], Bs[at], Cs[at]))
        store_slots(ssm_state, slots[:, i], state)
    y = torch.stack(outputs, 1).flatten(0, 1) + (xs * D[:, None])[tokens.view(-1)]
    return unpad(y, targets.view(-1), x)


def _advance(state: Tensor, decay: Tensor, u: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Process one token per request: update the state to decay * state + u B^T in place, and return state C.

    With R requests, H heads: state (R, H, P, N), decay (R, H), u = dt * x (R, H, P), B and C (R, groups, N).
    """
    num_rows, heads, channels, size = state.shape
    groups = B.shape[1]
    grouped = state.view(num_rows, groups, heads // groups, channels, size)
    state.mul_(decay[:, :, None, None])
    grouped.addcmul_(u.view(*grouped.shape[:-1], 1), B[:, :, None, None])
    flat = state.view(num_rows * groups, -1, size)
    return torch.bmm(C.reshape(-1, 1, size), flat.mT).view(num_rows, heads, channels)
