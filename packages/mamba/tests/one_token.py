"""One-token functions of the recurrences in float64, for `check_recurrence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import softplus

from bateleur.mamba import Mamba2, Recurrence, ShortConv
from bateleur.mamba.recurrences.delta_rule import DeltaRule


def one_token(spec: Recurrence) -> Callable[..., Any]:
    """step(params, channels, gates, state) -> (y, state)."""
    if isinstance(spec, ShortConv):
        return lambda params, channels, gates, state: (channels, state)
    if isinstance(spec, Mamba2):
        return _mamba2(spec)
    assert isinstance(spec, DeltaRule)
    return _delta_rule(spec)


def _mamba2(spec: Mamba2) -> Callable[..., Any]:
    def step(params, channels, gates, state):
        (A, D, dt_bias), (dt,), (x, B, C) = params, gates, (each[0] for each in spec.split(channels[None]))
        dt = softplus(dt + dt_bias).clamp(spec.dt_min, spec.dt_max)
        B, C = (each.repeat_interleave(spec.num_heads // spec.num_groups, 0) for each in (B, C))
        state = torch.exp(A * dt)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None]
        return (state * C[:, None]).sum(-1) + D[:, None] * x, state

    return step


def _delta_rule(spec: DeltaRule) -> Callable[..., Any]:
    def step(params, channels, gates, state):
        (A, dt_bias), (a, b), (q, k, v) = params, gates, (each[0] for each in spec.split(channels[None]))
        decay = torch.exp(A.view(-1, *[1] * (a.dim() - 1)) * softplus(a + dt_bias))
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(len(v) // len(k), 0) for x in (q, k))
        state = decay.view(len(v), 1, -1) * state
        u = spec.beta_scale * b.sigmoid()[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + u[:, :, None] * k[:, None]
        return torch.einsum("hvk,hk->hv", state, q) / q.shape[1] ** 0.5, state

    return step
