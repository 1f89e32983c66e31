"""`check_recurrence` passes the delta rules."""

from __future__ import annotations

import pytest
import torch

from bateleur.mamba import GatedDelta, KimiDelta
from bateleur.mamba.conformance import check_recurrence
from one_token import one_token

F64 = torch.float64
DTYPES = {"conv_dtype": F64, "ssm_dtype": F64}
MAKERS = {
    "gated": lambda **options: GatedDelta(3, 3, 5, 4, **options),
    "two values to a key": lambda **options: GatedDelta(2, 4, 3, 5, **options),
    "negative eigenvalues": lambda **options: GatedDelta(1, 3, 4, 3, True, **options),
    "kimi": lambda **options: KimiDelta(3, 5, 4, **options),
}


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
