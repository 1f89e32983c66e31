"""The delta rules token by token, with the arguments of their operators by name."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_scan_varlen(**args: object) -> Tensor:
    a = SimpleNamespace(**args)
    ends = zip(a.chunk_start_loc[1:].tolist(), a.chunk_write.tolist(), strict=True)
    pages = {end: slot for end, slot in ends if slot}
    return _recur(a, lambda row, token, i: pages.get(token + 1, 0))


def delta_state_update(**args: object) -> Tensor:
    a = SimpleNamespace(**args)
    return _recur(a, lambda row, token, i: int(a.write[row, i]))


def delta_replay_update(**args: object) -> Tensor:
    a = SimpleNamespace(**args)
    o, capacity, loc = torch.zeros_like(a.v), a.ring_k.shape[1], a.query_start_loc.tolist()
    states = _load(a.state, a.slot)
    for row, state in enumerate(states):
        ring, start, length = (int(each[row]) for each in (a.ring_row, a.ring_start, a.ring_len))
        if not ring:
            continue
        for entry in range(start, start + length):
            at = entry % capacity
            state = _add(state, a.ring_k[ring, at], a.ring_u[ring, at], a.ring_g[ring, at])
        for i, token in enumerate(range(loc[row], loc[row + 1])):
            state, u, g, o[token] = _step(a, token, state)
            at = (start + length + i) % capacity
            a.ring_k[ring, at], a.ring_u[ring, at], a.ring_g[ring, at] = a.k[token], u, g
    return o


def delta_fold_ring(**args: object) -> None:
    a = SimpleNamespace(**args)
    keep, capacity = a.conv_state.shape[2], a.ring_k.shape[2]
    for layer, states in enumerate(a.state):
        for row, state in enumerate(_load(states, a.src)):
            ring, start, first = (int(each[row]) for each in (a.ring_row, a.ring_start, a.page_offset))
            if page := int(a.dst[row]):
                for entry in range(start, start + int(a.count[row])):
                    at = layer, ring, entry % capacity
                    state = _add(state, a.ring_k[at], a.ring_u[at], a.ring_g[at])
                states[page] = state
                a.conv_state[layer, page] = a.live[layer, ring, first : first + keep]


def _recur(a: SimpleNamespace, slot_after) -> Tensor:
    o, loc = torch.zeros_like(a.v), a.query_start_loc.tolist()
    for row, state in enumerate(_load(a.state, a.read)):
        for i, token in enumerate(range(loc[row], loc[row + 1])):
            state, _, _, o[token] = _step(a, token, state)
            if slot := slot_after(row, token, i):
                a.state[slot] = state
    return o


def _step(a: SimpleNamespace, token: int, state: Tensor) -> tuple[Tensor, ...]:
    g = a.A.view(-1, *[1] * (a.a.dim() - 2)) * F.softplus(a.a[token].float() + a.dt_bias)
    beta = a.beta_scale * torch.sigmoid(a.b[token].float())
    q, k = (_unit(each[token], len(state)) for each in (a.q, a.k))
    state = state * torch.exp(g.view(len(state), 1, -1))
    u = beta[:, None] * (a.v[token].float() - torch.einsum("hvk,hk->hv", state, k))
    state = state + u[:, :, None] * k[:, None]
    return state, u, g, torch.einsum("hvk,hk->hv", state, q) * q.shape[1] ** -0.5


def _add(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    return state * torch.exp(g.view(len(state), 1, -1)) + u[:, :, None] * _unit(k, len(state))[:, None]


def _unit(x: Tensor, heads: int) -> Tensor:
    x = x.float()
    return (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // len(x), 0)


def _load(state: Tensor, read: Tensor) -> list[Tensor]:
    return [state[slot].float().clone() if slot else torch.zeros_like(state[0]).float() for slot in read]
