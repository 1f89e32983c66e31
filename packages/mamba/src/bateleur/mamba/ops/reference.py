"""The operators as naive loops over rows and tokens: the specification of every other form.

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


def _pages(chunk_start_loc: Tensor, chunk_write: Tensor) -> dict[int, int]:
    """The slot to write after so many tokens of the batch, for chunks that keep their state."""
    return {int(end): int(slot) for end, slot in zip(chunk_start_loc[1:], chunk_write, strict=True) if slot}


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
    live: Tensor | None,
    query_start_loc: Tensor,
    read: Tensor,
    chunk_start_loc: Tensor,
    chunk_row: Tensor,
    chunk_write: Tensor,
    live_write: Tensor | None,
    activation: str,
) -> Tensor:
    """Token by token: append the raw input to the window, convolve its last W entries."""
    del chunk_row
    keep = weight.shape[1] - 1
    pages = _pages(chunk_start_loc, chunk_write)
    y = torch.zeros_like(x)
    for row, window in enumerate(_load(conv_state[:, :keep], read, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        for token in range(start, end):
            window = torch.cat([window[-keep:], x[token : token + 1].to(window.dtype)])
            y[token] = _conv(window, weight, bias, activation)
            if slot := pages.get(token + 1):
                conv_state[slot, :keep] = window[1:].to(conv_state.dtype)
        if live is not None and live_write is not None and end > start and int(live_write[row]):
            live[int(live_write[row]), :keep] = window[1:].to(live.dtype)
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


def _advance(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """S <- exp(A step) S + step x B^T: (H, P, N) from x (H, P), step (H,), B (G, N)."""
    b = B.to(state.dtype).repeat_interleave(x.shape[0] // B.shape[0], 0)
    added = torch.einsum("h,hp,hn->hpn", step, x.to(state.dtype), b)
    return torch.exp(A * step)[:, None, None] * state + added


def _show(state: Tensor, x: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """y = S C + D x: (H, P)."""
    c = C.to(state.dtype).repeat_interleave(x.shape[0] // C.shape[0], 0)
    return torch.einsum("hpn,hn->hp", state, c) + D.to(state.dtype)[:, None] * x.to(state.dtype)


def _step(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Raw (H,) to step sizes."""
    return F.softplus(dt.to(dtype) + dt_bias).clamp(*limits)


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
    chunk_write: Tensor,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """The recurrence over all tokens of each row; chunks only say which states to keep."""
    del chunk_row, row_chunk_loc, max_chunks_per_row, chunk_size
    pages = _pages(chunk_start_loc, chunk_write)
    y = torch.zeros_like(x)
    for row, state in enumerate(_load(ssm_state, read, _compute(x))):
        for token in range(int(query_start_loc[row]), int(query_start_loc[row + 1])):
            step = _step(dt[token], dt_bias, (dt_min, dt_max), state.dtype)
            state = _advance(state, x[token], step, A, B[token])
            y[token] = _show(state, x[token], C[token], D).to(x.dtype)
            if slot := pages.get(token + 1):
                ssm_state[slot] = state.to(ssm_state.dtype)
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
            step = _step(dt[token], dt_bias, (dt_min, dt_max), state.dtype)
            state = _advance(state, x[token], step, A, B[token])
            y[token] = _show(state, x[token], C[token], D).to(x.dtype)
            if slot := int(write[row, token - start]):
                ssm_state[slot] = state.to(ssm_state.dtype)
    return y


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate, then normalise each group of channels by its root mean square, then scale."""
    y = x.to(_compute(x)) * F.silu(z.to(_compute(x)))
    parts = [part / torch.sqrt(part.pow(2).mean(-1, keepdim=True) + eps) for part in y.chunk(groups, dim=-1)]
    return torch.cat(parts, -1).to(x.dtype) * weight


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
    """Append each token to the ring, and run the recurrence from the slot over all entries up to it."""
    del max_query_len
    y = torch.zeros_like(x)
    for row, base in enumerate(_load(ssm_state, slot, _compute(x))):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        ring, length = int(ring_row[row]), int(ring_len[row])
        if ring == 0:
            continue
        for token in range(start, end):
            at = (int(ring_start[row]) + length + token - start) % ring_x.shape[1]
            ring_x[ring, at] = x[token].to(ring_x.dtype)
            ring_dt[ring, at] = _step(dt[token], dt_bias, (dt_min, dt_max), base.dtype).to(ring_dt.dtype)
            ring_B[ring, at] = B[token].to(ring_B.dtype)
            rings = (ring_x[ring], ring_dt[ring], ring_B[ring])
            state = _replay(base, rings, int(ring_start[row]), length + token - start + 1, A)
            y[token] = _show(state, x[token], C[token], D).to(x.dtype)
    return y


def _replay(state: Tensor, rings: tuple[Tensor, Tensor, Tensor], start: int, count: int, A: Tensor) -> Tensor:
    """The state after `count` entries of one row's ring."""
    x, step, B = rings
    for at in (entry % x.shape[0] for entry in range(start, start + count)):
        state = _advance(state, x[at], step[at].to(state.dtype), A, B[at])
    return state


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
    """Run the recurrence from `src` over the first `count` entries of the ring, and cut the window out of `live`."""
    keep = conv_state.shape[2]
    layers = zip(ssm_state, conv_state, live, ring_x, ring_dt, ring_B, A, strict=True)
    for ssm, conv, windows, x, step, B, a in layers:
        for row, state in enumerate(_load(ssm, src, _compute(ring_dt))):
            if page := int(dst[row]):
                ring, first = int(ring_row[row]), int(conv_offset[row])
                rings = (x[ring], step[ring], B[ring])
                folded = _replay(state, rings, int(ring_start[row]), int(count[row]), a)
                ssm[page] = folded.to(ssm.dtype)
                conv[page] = windows[ring, first : first + keep].to(conv.dtype)


def copy_states(
    conv_state: Tensor, ssm_state: Tensor, conv_src: Tensor, conv_bias: Tensor, ssm_src: Tensor, dst: Tensor
) -> None:
    """Copy whole pages, the windows without their first `conv_bias` entries; what lies behind the rest stays."""
    for conv, ssm in zip(conv_state, ssm_state, strict=True):
        windows, states = _load(conv, conv_src, conv.dtype), _load(ssm, ssm_src, ssm.dtype)
        for row, (window, state) in enumerate(zip(windows, states, strict=True)):
            if page := int(dst[row]):
                shifted = window[int(conv_bias[row]) :]
                conv[page, : len(shifted)] = shifted
                ssm[page] = state
