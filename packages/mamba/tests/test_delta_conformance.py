"""The delta rules are held to a function of one token by the public kit."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from bateleur.mamba import GatedDelta, KimiDelta
from bateleur.mamba.conformance import check_recurrence
from bateleur.mamba.recurrences.delta_rule import DeltaRule

F64 = torch.float64
DTYPES = {"conv_dtype": F64, "ssm_dtype": F64}
MAKERS = {
    "gated": lambda **options: GatedDelta(3, 3, 5, 4, **options),
    "two values to a key": lambda **options: GatedDelta(2, 4, 3, 5, **options),
    "negative eigenvalues": lambda **options: GatedDelta(1, 3, 4, 3, True, **options),
    "kimi": lambda **options: KimiDelta(3, 5, 4, **options),
}


def one_token(spec: DeltaRule):
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


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("drafts", "capacity"), [(1, 3), (3, 9), (5, 16)])
def test_delta_rules_conform(kind, drafts, capacity):
    spec = MAKERS[kind](conv_width=2 + drafts // 2, **DTYPES)
    report = check_recurrence(spec, one_token(spec), drafts=drafts, ring_capacity=capacity, seed=drafts)
    assert report.tokens > 300
    assert report.calls["replay"] >= 2 * capacity
    assert min(report.calls[name] for name in ("scan", "update", "fold")) > 4


@pytest.mark.parametrize("kind", ["two values to a key", "kimi"])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_delta_rules_conform_in_low_precision(kind, act, kept):
    spec = MAKERS[kind](conv_dtype=act, ssm_dtype=kept)
    check_recurrence(spec, one_token(spec), tolerance=None if act == kept else 0.05)
