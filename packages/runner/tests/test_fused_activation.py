"""Activations, gates and heads of a latent: Triton compared with torch, and compiled for sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from bateleur.metadata.dispatch import load
from bateleur.runner.models import attention, mlp  # noqa: F401  attention defines operators
from bateleur.runner.models.operators import FORMS
from bateleur.runner.models.spec import Activation

triton = pytest.importorskip("triton", reason="triton is not installed")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
KINDS = [(name, True) for name in get_args(Activation)] + [("silu", False), ("relu2", False)]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "gated"), KINDS)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # x / inf is the 0 that is meant
def test_the_kernel_says_what_the_torch_form_says(name: str, gated: bool, dtype: torch.dtype) -> None:
    """Rows are parts of wider ones; a padded token stays zero, and NaN stays in its token."""
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
        nearly_zero = 1e-5 if name == "gelu_tanh" else 1e-6  # torch rounds 1 + tanh, which is next to 0 there
        torch.testing.assert_close(found, wanted, rtol=places, atol=nearly_zero, equal_nan=True)


def test_arguments_may_be_given_by_name() -> None:
    x, by = torch.randn(2, 3, 8)
    assert torch.equal(mlp.gate(x, by=by, name="silu"), mlp.gate(x, by, "silu"))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_a_gate_says_what_its_torch_form_says(name: str, dtype: torch.dtype) -> None:
    """Gates do not depend on other lanes; NaN stays in its lane."""
    forms = FORMS["gate"]
    for num_tokens, size in ((0, 8), (3, 1100), (5, 24)):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(num_tokens, 2 * size + 3, generator=generator).mul_(4).to(dtype)
        by, x = wide[:, :size], wide[:, size:-3]
        wide[1:2, 1] = torch.nan
        found, wanted = load(forms.triton or "")(x, by, name), forms.torch(x, by, name)
        assert found.dtype == dtype
        places = 2**-9 if dtype == torch.float16 else 2e-6
        torch.testing.assert_close(found, wanted, rtol=places, atol=1e-6, equal_nan=True)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_a_latent_are_the_torch_forms_bit_for_bit(dtype: torch.dtype) -> None:
    """With more, fewer and as many lanes of a key as of a value; also for no tokens."""
    forms = FORMS["join_heads"]
    for num_tokens, heads, key, shared, value in ((0, 2, 8, 4, 8), (3, 3, 8, 4, 8), (2, 5, 4, 2, 10), (4, 1, 4, 4, 8)):
        made = torch.randn(num_tokens, heads * (key + value) + 3).to(dtype)[:, :-3]
        same = torch.randn(num_tokens, shared + 5).to(dtype)[:, 2:-3]
        args = made, same, heads, key, max(key + shared, value)
        for mine, theirs in zip(load(forms.triton or "")(*args), forms.torch(*args), strict=True):
            assert mine.dtype == dtype
            assert mine.is_contiguous()
            assert torch.equal(mine, theirs)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == 2 * len(KINDS) + 1 + 4 + 2
