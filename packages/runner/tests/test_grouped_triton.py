"""Grouped products in Triton compared with float64, in Triton's interpreter: the last test starts that process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bateleur.metadata.dispatch import load
from bateleur.runner.models import grouped

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.runner.models.kernels import grouped as grouped_triton  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")


def product(counts: list[int], depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and matrices that are parts of larger ones, ends, and the expected result."""
    generator, groups = torch.Generator().manual_seed(0), len(counts)
    x = torch.randn(sum(counts), depth + 3, generator=generator).to(dtype)[:, :depth]
    weight = torch.randn(groups, columns + 2, depth, generator=generator).to(dtype)[:, :columns]
    own = torch.arange(groups).repeat_interleave(torch.tensor(counts))
    wanted = torch.einsum("sk,snk->sn", x.double(), weight.double()[own])
    return x, weight, torch.tensor(counts).cumsum(0).int(), wanted


@interpreted
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [16, 32, 1], [0, 64, 6]], ids=str)
def test_each_row_is_multiplied_with_the_matrix_of_its_group(counts: list[int]) -> None:
    form = load(grouped.FORMS.triton or "")
    for depth, columns, dtype, tolerance in ((8, 12, torch.float32, 1e-5), (70, 67, torch.float16, 2e-2)):
        x, weight, ends, wanted = product(counts, depth, columns, dtype)
        clean = form(x, weight, ends)
        assert clean.dtype == dtype
        torch.testing.assert_close(clean.double(), wanted, rtol=tolerance, atol=tolerance)
        x[0] = x[-1] = torch.nan
        assert torch.equal(form(x, weight, ends)[1:-1], clean[1:-1])


@interpreted
def test_no_rows() -> None:
    x, weight, ends, _ = product([0, 0], 8, 12, torch.float32)
    assert grouped_triton.grouped_products(x, weight, ends).shape == (0, 12)


def test_float64_has_the_form_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, which the tensor here only claims to be on."""
    asked: list[str] = []
    forms = grouped.Implementations(lambda *_: asked.append("torch"), triton="nowhere:nothing")
    monkeypatch.setattr(grouped, "FORMS", forms)
    monkeypatch.setattr(grouped, "torch_supports", lambda *_: False)

    class OnCuda:
        is_cpu, is_cuda, dtype = False, True, torch.float64

    grouped.grouped_product(OnCuda(), *[OnCuda()] * 2)  # type: ignore[arg-type]
    assert asked == ["torch"]


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
