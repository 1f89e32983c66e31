"""Activations with their gates in one kernel: the Triton form against the torch form, and compiled for sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bateleur.metadata.forms import load
from bateleur.runner.models import mlp  # noqa: F401  defines the operator
from bateleur.runner.models.operators import FORMS

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.runner.models.kernels import activation as kernels  # noqa: E402
from compiled import hopper  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
KINDS = [("silu", True), ("silu", False), ("relu2", True), ("relu2", False)]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "gated"), KINDS)
def test_the_kernel_says_what_the_torch_form_says(name: str, gated: bool, dtype: torch.dtype) -> None:
    """Over rows that are part of wider ones; a padded token stays zero, and a NaN one."""
    forms = FORMS["activation"]
    for num_tokens, size in ((0, 8), (1, 40), (5, 1100), (33, 24)):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(num_tokens, size * (1 + gated) + 3, generator=generator).mul_(4).to(dtype)[:, :-3]
        wide[1:2] = 0
        wide[2:3, 0] = torch.nan
        found = load(forms.triton or "")(wide, size, name, gated)
        wanted = forms.torch(wide, size, name, gated)
        assert found.dtype == dtype
        assert not found[1:2].any()
        places = 2**-6 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(found, wanted, rtol=places, atol=1e-6, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="nothing compiles in Triton's interpreter")
@pytest.mark.parametrize(("name", "gated"), [("silu", True), ("relu2", False)])
def test_the_kernel_fits_hopper(
    name: str, gated: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    constants = {"SIZE": 14336, "GATED": gated, "SILU": name == "silu", **kernels.tile_options(14336)}
    usage = hopper(kernels.activation_kernel, constants, {"wide_ptr": "bf16", "out_ptr": "bf16"}, tmp_path)
    record_property("kernel", (f"runner activation {name}", *usage.recorded))
    assert usage.spilled == usage.shared == 0
    assert usage.registers <= 48


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == 2 * len(KINDS)
