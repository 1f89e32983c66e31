"""The five operators as naive loops over rows and tokens: the specification of every other form.

Each function has the signature of its operator and mutates the states in place. float64 inputs are computed in
float64. Nothing here is fast, nothing here is shared with the other forms.

Slots: reading slot 0 is reading zeros, writing slot 0 is writing nothing. A row without tokens touches nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _compute(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _load(state: Tensor, read: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A copy of every row's initial state: all reads come before all writes."""
    return [
        state[slot].to(dtype, copy=True) if slot else torch.zeros_like(state[0], dtype=dtype) for slot in read
    ]


def _conv(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """(W, C) inputs, newest last, to (C,)."""
    y = (window * weight.T.to(window.dtype)).sum(0)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    read: Tensor,
    write: Tensor,
    activation: str,
) -> Tensor:
    """Token by token: append the raw input to the window, convolve its last W entries."""
    keep = weight.shape[1] - 1
    y = torch.zeros_like(x)
    for row, window in enumerate(_load(conv_state[:, :keep], read, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            window = torch.cat([window, x[token : token + 1].to(window.dtype)])
            y[token] = _conv(window[-keep - 1 :], weight, bias, activation)
        if end > start and int(write[row]):
            conv_state[int(write[row]), :keep] = window[-keep:].to(conv_state.dtype)
    return y


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    read: Tensor,
    offset: Tensor,
    write: Tensor,
    activation: str,
) -> Tensor:
    """Start from the window at `offset`, and store all that a later offset may ask for."""
    del max_query_len
    keep = weight.shape[1] - 1
    y = torch.zeros_like(x)
    for row, entries in enumerate(_load(conv_state, read, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        window = entries[int(offset[row]) :][:keep]
        for token in range(start, end):
            window = torch.cat([window, x[token : token + 1].to(window.dtype)])
            y[token] = _conv(window[-keep - 1 :], weight, bias, activation)
        if end > start and int(write[row]):
            conv_state[int(write[row]), : keep - 1 + end - start] = window[1:].to(conv_state.dtype)
    return y


def _recur(
    state: Tensor,
    token: int,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: S <- exp(A dt) S + dt x B^T, y = S C + D x; (H, P, N) to itself and y (H, P)."""
    heads, groups, dtype = x.shape[1], B.shape[1], state.dtype
    step = F.softplus(dt[token].to(dtype) + dt_bias).clamp(*limits)
    b = B[token].to(dtype).repeat_interleave(heads // groups, 0)
    c = C[token].to(dtype).repeat_interleave(heads // groups, 0)
    u = x[token].to(dtype)
    state = torch.exp(A * step)[:, None, None] * state + torch.einsum("h,hp,hn->hpn", step, u, b)
    return state, torch.einsum("hpn,hn->hp", state, c) + D.to(dtype)[:, None] * u


def ssd_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    query_start_loc: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    row_chunk_loc: Tensor,
    max_chunks_per_row: int,
    chunk_size: int,
    read: Tensor,
    write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The recurrence over all tokens of each row; chunks are a matter of speed, and ignored here."""
    del chunk_start_loc, chunk_row, row_chunk_loc, max_chunks_per_row, chunk_size
    y = torch.zeros_like(x)
    for row, state in enumerate(_load(ssm_state, read, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            state, y_token = _recur(state, token, x, dt, A, B, C, D, dt_bias, (dt_min, dt_max))
            y[token] = y_token.to(x.dtype)
        if end > start and int(write[row]):
            ssm_state[int(write[row])] = state.to(ssm_state.dtype)
    return y


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
    """The recurrence, with the state after token i of a row stored in slot write[row, i]."""
    del max_query_len
    y = torch.zeros_like(x)
    for row, state in enumerate(_load(ssm_state, read, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            state, y_token = _recur(state, token, x, dt, A, B, C, D, dt_bias, (dt_min, dt_max))
            y[token] = y_token.to(x.dtype)
            if slot := int(write[row, token - start]):
                ssm_state[slot] = state.to(ssm_state.dtype)
    return y


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate, then normalise each group of channels by its root mean square, then scale."""
    y = x.to(_compute(x)) * F.silu(z.to(_compute(x)))
    parts = [part / torch.sqrt(part.pow(2).mean(-1, keepdim=True) + eps) for part in y.chunk(groups, dim=-1)]
    return torch.cat(parts, -1).to(x.dtype) * weight
