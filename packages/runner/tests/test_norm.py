"""Norms, by torch's operators and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bateleur.runner.models import native
from bateleur.runner.models.norm import RMSNorm


@pytest.mark.parametrize("size", [1, 24, 64, 577])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_normalised_each_by_itself(
    size: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and (reason := native.missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(native, "missing", lambda: None if compiled else "none is wanted")
    norm = RMSNorm(size, 1e-5, torch.empty(0))
    norm.weight.copy_(torch.rand(size) + 0.5)
    x = torch.randn(7, 2 * size)[:, :size]
    x[3] = 0
    together = norm(x)
    want = F.rms_norm(x.double(), (size,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(together.double(), want, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(norm(x[t : t + 1])[0], together[t]) for t in range(7))
    x[2, 0] = torch.nan
    assert norm(x)[2].isnan().all()
    assert torch.equal(norm(x)[3:], together[3:])
