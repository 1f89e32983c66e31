"""The operators as naive loops over rows and tokens: the specification of all other forms, with which it shares no
code.

Each function has the signature of its operator and updates the states in place. float64 inputs are computed in float64.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.mamba.ops.custom_op import FORMS


def _specifies(naive: Callable[[SimpleNamespace], Any]) -> Callable[..., Any]:
    """Give `naive`, which takes all arguments as one object, the signature of the operator of the same name."""
    declared = FORMS[naive.__name__].torch
    signature = inspect.signature(declared)

    @wraps(declared)
    def form(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return naive(SimpleNamespace(**bound.arguments))

    return form


@_specifies
def causal_conv1d_varlen(a: SimpleNamespace) -> Tensor:
    """Append each raw input to the window, and convolve its last W entries."""
    keep, pages, y = a.weight.shape[1] - 1, _pages(a), torch.zeros_like(a.x)
    for row, window, tokens in _rows(a, a.conv_state[:, :keep], a.read):
        for token in tokens:
            window = torch.cat([window[-keep:], a.x[token : token + 1]])
            y[token] = _convolve(window, a)
            if slot := pages.get(token + 1):
                a.conv_state[slot, :keep] = window[1:]
        if a.request_conv is not None and tokens and a.request_conv_write[row]:
            a.request_conv[a.request_conv_write[row], :keep] = window[1:]
    return y


@_specifies
def causal_conv1d_update(a: SimpleNamespace) -> Tensor:
    """Convolve decodes from the conv window at `offset`; store all entries that a later offset can select."""
    keep, y = a.weight.shape[1] - 1, torch.zeros_like(a.x)
    for row, entries, tokens in _rows(a, a.conv_state, a.read):
        window = entries[a.offset[row] :][:keep]
        for token in tokens:
            window = torch.cat([window, a.x[token : token + 1]])
            y[token] = _convolve(window[-keep - 1 :], a)
        if tokens and a.write[row]:
            a.conv_state[a.write[row], : keep - 1 + len(tokens)] = window[1:]
    return y


@_specifies
def ssd_scan_varlen(a: SimpleNamespace) -> Tensor:
    """Run Mamba-2 over all tokens of each request; chunks only select the states to store."""
    pages = _pages(a)
    return _run_ssm(a, lambda row, token, i: pages.get(token + 1, 0))


@_specifies
def selective_state_update(a: SimpleNamespace) -> Tensor:
    """Run Mamba-2, and store the state after token i of a request in state slot write[row, i]."""
    return _run_ssm(a, lambda row, token, i: int(a.write[row, i]))


@_specifies
def replay_update(a: SimpleNamespace) -> Tensor:
    """Append each token to the ring, and run Mamba-2 from the saved state over all ring entries."""
    y, capacity = torch.zeros_like(a.x), a.ring_x.shape[1]
    for row, base, tokens in _rows(a, a.ssm_state, a.slot):
        ring, start, length = (int(each[row]) for each in (a.ring_row, a.ring_start, a.ring_len))
        rings = (a.ring_x[ring], a.ring_dt[ring], a.ring_B[ring])
        for count, token in enumerate(tokens if ring else (), length + 1):
            for entries, new in zip(rings, (a.x[token], _step(a, token, base), a.B[token]), strict=True):
                entries[(start + count - 1) % capacity] = new
            state = _replay(base, rings, start, count, a.A)
            y[token] = _output(state, a.x[token], a.C[token], a.D)
    return y


@_specifies
def fold_ring(a: SimpleNamespace) -> None:
    """Run Mamba-2 from slot `src` over the first `count` ring entries; copy the conv window from `request_conv`."""
    keep = a.conv_state.shape[2]
    layers = zip(a.ssm_state, a.conv_state, a.request_conv, a.ring_x, a.ring_dt, a.ring_B, a.A, strict=True)
    for ssm, conv, request_conv, x, step, B, A in layers:
        for row, state in enumerate(_load(ssm, a.src, _compute(step))):
            if page := int(a.dst[row]):
                ring, first = a.ring_row[row], int(a.page_offset[row])
                rings = (x[ring], step[ring], B[ring])
                ssm[page] = _replay(state, rings, int(a.ring_start[row]), int(a.count[row]), A)
                conv[page] = request_conv[ring, first : first + keep]


@_specifies
def fold_window(a: SimpleNamespace) -> None:
    """Copy conv windows of running requests from `request_conv` to state slots."""
    keep = a.conv_state.shape[2]
    for conv, request_conv in zip(a.conv_state, a.request_conv, strict=True):
        for ring, page, first in zip(a.ring_row, a.dst, a.page_offset, strict=True):
            if page:
                conv[page] = request_conv[ring, first : first + keep]


@_specifies
def copy_states(a: SimpleNamespace) -> None:
    """Copy states, and conv windows without their first `conv_bias` entries; other entries are not changed."""
    for conv in a.conv_state:
        for page, window, bias in zip(a.dst, _load(conv, a.conv_src, conv.dtype), a.conv_bias, strict=True):
            if page:
                conv[page, : len(window) - bias] = window[bias:]
    for ssm in () if a.ssm_state is None else a.ssm_state:
        for page, state in zip(a.dst, _load(ssm, a.ssm_src, ssm.dtype), strict=True):
            if page:
                ssm[page] = state


@_specifies
def delta_scan_varlen(a: SimpleNamespace) -> Tensor:
    """Run the delta rule over all tokens of each request; chunks only select the states to store."""
    pages = _pages(a)
    return _run_delta(a, lambda row, token, i: pages.get(token + 1, 0))


@_specifies
def delta_state_update(a: SimpleNamespace) -> Tensor:
    """Run the delta rule, and store the state after token i of a request in state slot write[row, i]."""
    return _run_delta(a, lambda row, token, i: int(a.write[row, i]))


@_specifies
def delta_replay_update(a: SimpleNamespace) -> Tensor:
    """Update the saved state with the ring entries, run the delta rule from there, and append tokens to the ring."""
    o, capacity = torch.zeros_like(a.v), a.ring_k.shape[1]
    for row, state, tokens in _rows(a, a.state, a.slot):
        ring, start, length = (int(each[row]) for each in (a.ring_row, a.ring_start, a.ring_len))
        rings = (a.ring_k[ring], a.ring_u[ring], a.ring_g[ring])
        if ring:
            state = _replay_delta(state, rings, start, length)
        for count, token in enumerate(tokens if ring else (), length):
            state, u, g, o[token] = _delta(a, token, state)
            for entries, new in zip(rings, (a.k[token], u, g), strict=True):
                entries[(start + count) % capacity] = new
    return o


@_specifies
def delta_fold_ring(a: SimpleNamespace) -> None:
    """Update the state in slot `src` with the first `count` ring entries; copy the window from `request_conv`."""
    keep = a.conv_state.shape[2]
    layers = zip(a.state, a.conv_state, a.request_conv, a.ring_k, a.ring_u, a.ring_g, strict=True)
    for states, conv, request_conv, k, u, g in layers:
        for row, state in enumerate(_load(states, a.src, _compute(u))):
            if page := int(a.dst[row]):
                ring, first = a.ring_row[row], int(a.page_offset[row])
                rings = (k[ring], u[ring], g[ring])
                states[page] = _replay_delta(state, rings, int(a.ring_start[row]), int(a.count[row]))
                conv[page] = request_conv[ring, first : first + keep]


@_specifies
def gated_rms_norm(a: SimpleNamespace) -> Tensor:
    """Gate, normalize each group of channels by its root mean square, and scale; or gate at the end."""
    x, z = a.x.to(_compute(a.x)), a.z.to(_compute(a.x))
    gate = F.silu(z) if a.activation == "silu" else torch.sigmoid(z)
    weight = a.weight.repeat(a.x.shape[-1] // a.weight.shape[0])
    y = x if a.norm_first else x * gate
    parts = [part / torch.sqrt(part.pow(2).mean(-1, keepdim=True) + a.eps) for part in y.chunk(a.groups, -1)]
    y = torch.cat(parts, -1)
    return (y * weight * gate).to(a.x.dtype) if a.norm_first else y.to(a.x.dtype).mul(weight)


def _compute(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _load(state: Tensor, read: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return copies of the states in slots `read`, zeros for slot 0, so that all reads come before all writes."""
    return [state[slot].to(dtype, copy=True) if slot else torch.zeros_like(state[0], dtype=dtype) for slot in read]


def _rows(a: SimpleNamespace, state: Tensor, read: Tensor) -> Iterator[tuple[int, Tensor, range]]:
    """Yield each row (request) with its initial state and the range of its tokens."""
    loc = a.query_start_loc.tolist()
    for row, initial in enumerate(_load(state, read, _compute(a.x if hasattr(a, "x") else a.v))):
        yield row, initial, range(loc[row], loc[row + 1])


def _pages(a: SimpleNamespace) -> dict[int, int]:
    """Return the state slot to write after a chunk, by the index of the token after the chunk."""
    ends = zip(a.chunk_start_loc[1:].tolist(), a.chunk_write.tolist(), strict=True)
    return {end: slot for end, slot in ends if slot}


def _convolve(window: Tensor, a: SimpleNamespace) -> Tensor:
    """Convolve W inputs (W, C), newest last, to one output (C,)."""
    y = (window * a.weight.T.to(window.dtype)).sum(0)
    if a.bias is not None:
        y = y + a.bias
    return F.silu(y) if a.activation == "silu" else y


def _run_ssm(a: SimpleNamespace, slot_after: Callable[[int, int, int], int]) -> Tensor:
    """Run Mamba-2; slot_after(row, token, index in the row) is the state slot to write after a token, or 0."""
    y = torch.zeros_like(a.x)
    for row, state, tokens in _rows(a, a.ssm_state, a.read):
        for i, token in enumerate(tokens):
            state = _advance(state, a.x[token], _step(a, token, state), a.A, a.B[token])
            y[token] = _output(state, a.x[token], a.C[token], a.D)
            if slot := slot_after(row, token, i):
                a.ssm_state[slot] = state
    return y


def _replay(state: Tensor, rings: tuple[Tensor, ...], start: int, count: int, A: Tensor) -> Tensor:
    """Return the Mamba-2 state after `count` entries of one request's ring."""
    x, step, B = rings
    for at in (entry % len(x) for entry in range(start, start + count)):
        state = _advance(state, x[at], step[at].to(state.dtype), A, B[at])
    return state


def _advance(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return exp(A step) S + step x B^T, (H, P, N), from x (H, P), step (H,) and B (G, N)."""
    b = B.to(state.dtype).repeat_interleave(len(x) // len(B), 0)
    return torch.exp(A * step)[:, None, None] * state + torch.einsum("h,hp,hn->hpn", step, x.to(state.dtype), b)


def _output(state: Tensor, x: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Return S C + D x, (H, P)."""
    c = C.to(state.dtype).repeat_interleave(len(x) // len(C), 0)
    return torch.einsum("hpn,hn->hp", state, c) + D.to(state.dtype)[:, None] * x.to(state.dtype)


def _step(a: SimpleNamespace, token: int, state: Tensor) -> Tensor:
    """Return the step sizes (H,) of a token."""
    return F.softplus(a.dt[token].to(state.dtype) + a.dt_bias).clamp(a.dt_min, a.dt_max)


def _run_delta(a: SimpleNamespace, slot_after: Callable[[int, int, int], int]) -> Tensor:
    """Run the delta rule; slot_after(row, token, index in the row) is the state slot to write after a token, or 0."""
    o = torch.zeros_like(a.v)
    for row, state, tokens in _rows(a, a.state, a.read):
        for i, token in enumerate(tokens):
            state, _, _, o[token] = _delta(a, token, state)
            if slot := slot_after(row, token, i):
                a.state[slot] = state
    return o


def _delta(a: SimpleNamespace, token: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Process one token: return state, corrected value u (H, Dv), log decay g (H,) or (H, Dk), output (H, Dv)."""
    dtype, raw = state.dtype, a.a[token].to(state.dtype)
    g = (a.A if raw.dim() == 1 else a.A[:, None]) * F.softplus(raw + a.dt_bias)
    beta = a.beta_scale * torch.sigmoid(a.b[token].to(dtype))
    q, k = (_unit(each[token].to(dtype), len(state)) for each in (a.q, a.k))
    state = torch.exp(g).view(len(state), 1, -1) * state
    u = beta[:, None] * (a.v[token].to(dtype) - torch.einsum("hvk,hk->hv", state, k))
    state = state + torch.einsum("hv,hk->hvk", u, k)
    return state, u, g, torch.einsum("hvk,hk->hv", state, q) * q.shape[1] ** -0.5


def _replay_delta(state: Tensor, rings: tuple[Tensor, ...], start: int, count: int) -> Tensor:
    """Return the state after `count` entries of one request's ring: S <- exp(g) S + u k^T."""
    ring_k, ring_u, ring_g = rings
    for at in (entry % len(ring_k) for entry in range(start, start + count)):
        k = _unit(ring_k[at].to(state.dtype), len(state))
        decay = torch.exp(ring_g[at].to(state.dtype)).view(len(state), 1, -1)
        state = decay * state + torch.einsum("hv,hk->hvk", ring_u[at].to(state.dtype), k)
    return state


def _unit(x: Tensor, heads: int) -> Tensor:
    """Normalize (G, Dk) vectors to length 1, and repeat them for the value heads: (H, Dk)."""
    x = x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads // len(x), 0)
