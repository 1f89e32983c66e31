"""`check_recurrence` with the Triton kernels in the interpreter.

Mamba-2 is left out, whose kernels run for whole engines in `tests/interpreted_engine.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from bateleur.mamba import GatedDelta, KimiDelta, Recurrence, ShortConv
from bateleur.mamba.conformance import check_recurrence
from bateleur.mamba.ops import FORMS
from bateleur.metadata.dispatch import load
from one_token import one_token

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
F32 = {"conv_dtype": torch.float32, "ssm_dtype": torch.float32}
SPECS = [GatedDelta(1, 2, 5, 3, conv_width=2, **F32), KimiDelta(2, 5, 3, **F32), ShortConv(5, conv_width=3, **F32)]


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replace the torch forms by the kernels, and count their calls."""
    calls = Counter[str]()

    def counted(name: str) -> Callable[..., object]:
        kernel = load(FORMS[name].triton or "")

        def call(*args: object) -> object:
            calls[name] += 1
            return kernel(*args)

        return call

    for name, forms in FORMS.items():
        monkeypatch.setattr(forms, "torch", counted(name))
        monkeypatch.setattr(forms, "native", None)
    return calls


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on a CPU in Triton's interpreter alone")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_kernels_conform(spec: Recurrence, by_triton: Counter[str]) -> None:
    report = check_recurrence(spec, one_token(spec), drafts=1, ring_capacity=3)
    assert report.tokens > 200
    assert len(by_triton) >= 3


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) >= len(SPECS)
