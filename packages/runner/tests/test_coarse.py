"""Products in eight bits: what they are, to the bit, whatever stands beside a token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bateleur.runner.models import native
from bateleur.runner.models.coarse import CoarseProjection
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.native import coarse
from bateleur.runner.spec_decode.draft_head import quantizes

CPU = torch.device("cpu")
REASON = coarse.why_not(CPU, torch.float32)
multiplies = pytest.mark.skipif(REASON is not None, reason=f"no products of eight bits: {REASON}")
SHAPES = [(64 * coarse._AT_ONCE + 70, 12), (513, 260), (64, 64), (7, 30), (128, 1), (1, 5), (33, 3)]


def made(rows: int, columns: int, *, bias: bool = True) -> CoarseProjection:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator)
    return CoarseProjection(weight, torch.randn(rows, generator=generator) if bias else None)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (T, K) and scales (T, 1) of tokens, as the kernel is to find them."""
    largest = x.abs().amax(1, keepdim=True)
    times = torch.where(largest > 0, 127 / largest, 0)
    return (x.double() * times.double()).round(), (largest / 127).double()


@multiplies
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_those_of_rounded_numbers_and_alike_beside_any_others(
    rows: int, columns: int, bias: bool
) -> None:
    projection = made(rows, columns, bias=bias)
    weight, x = projection.weight, torch.randn(26, 2 * columns)[:, ::2]
    projection.pack()
    assert projection.is_packed
    whole, scale = rounded(x)
    want = (whole @ projection.weight.double().t()) * scale
    if projection.bias is not None:
        want += projection.bias.double()
    together = projection(x)
    torch.testing.assert_close(together.double(), want, rtol=1e-6, atol=1e-5)
    for tokens in range(26):
        assert torch.equal(projection(x[:tokens]), together[:tokens])
        assert torch.equal(projection(x[tokens:].contiguous()), together[tokens:])
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((projection.weight - weight).abs() <= 0.5001 * step).all()
    again = CoarseProjection(projection.weight, projection.bias)
    again.pack()
    torch.testing.assert_close(again.weight, projection.weight)


@multiplies
def test_products_are_off_by_a_hundredth() -> None:
    projection, x = made(512, 512, bias=False), torch.randn(64, 512)
    want = x @ projection.weight.t()
    projection.pack()
    assert (projection(x) - want).norm() / want.norm() < 0.015


@multiplies
def test_the_largest_sums_that_there_are_fit() -> None:
    """Of as many columns as are packed: one more is packed as others are."""
    columns = coarse._MOST_COLUMNS
    projection = CoarseProjection(torch.full((3, columns), -2.0))
    projection.pack()
    assert projection._coarse is not None
    want = torch.full((2, 3), -2.0 * columns)
    torch.testing.assert_close(projection(torch.ones(2, columns)), want)
    torch.testing.assert_close(projection(-torch.ones(2, columns)), -want)
    wider = CoarseProjection(torch.ones(2, columns + 1))
    wider.pack()
    assert wider._coarse is None
    assert wider.is_packed
    torch.testing.assert_close(wider(torch.ones(1, columns + 1)), torch.full((1, 2), columns + 1.0))


@multiplies
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 15, 16, 36])
def test_a_token_that_is_not_finite_has_no_numbers_and_others_have_theirs(value: float, column: int) -> None:
    projection, x = made(70, 37), torch.randn(5, 37)
    projection.pack()
    clean = projection(x)
    x[2, column] = value
    assert projection(x)[2].isnan().all()
    assert torch.equal(projection(x)[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@multiplies
def test_nothing_and_next_to_nothing_are_multiplied() -> None:
    """Zeros have no scale, and the 127th of a subnormal number is none to divide by."""
    weight, x = torch.randn(9, 20), torch.zeros(4, 20)
    weight[3], weight[5], weight[6, 2:] = 0, 1e-44, 0
    x[1], x[2, 3], x[3] = 1e-44, -1e-38, torch.randn(20)
    projection = CoarseProjection(weight)
    projection.pack()
    y = projection(x)
    assert torch.equal(y[0], torch.zeros(9))
    assert y.isfinite().all()
    assert y[:3].abs().max() < 1e-36
    torch.testing.assert_close(y[3], weight @ x[3], rtol=0, atol=0.2)
    small, x = torch.randn(3, 5) * 1e-36, torch.randn(2, 5) * 1e30
    projection = CoarseProjection(small)
    projection.pack()
    torch.testing.assert_close(projection(x), x @ small.t(), rtol=0, atol=5e-7)


@multiplies
def test_what_is_wrong_is_refused() -> None:
    projection = made(7, 30)
    projection.pack()
    for x in (torch.randn(2, 29), torch.randn(2, 30).bfloat16(), torch.randn(2, 32), torch.randn(30)):
        with pytest.raises(ValueError, match=r"^x is .*; it must have 30 columns of torch\.float32$"):
            projection(x)
    assert projection(torch.randn(0, 30)).shape == (0, 7)


@multiplies
def test_graphs_record_it_and_c_may_call_it() -> None:
    projection = made(7, 30)
    projection.pack(recorded=True)
    product = projection.in_c
    assert product is not None
    assert (product.rows, product.columns, product.bias) == (7, 30, projection.bias)
    args = torch.randn(3, 30), product.weight, product.bias, 7, 30
    torch.library.opcheck(torch.ops.bateleur.coarse_linear.default, args)


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "reason"),
    [
        (None, "cuda", torch.float32, "on cuda there are no products of eight bits"),
        (None, "cpu", torch.bfloat16, "products of eight bits take tokens in float32, not in bfloat16"),
        ("missing", "cpu", torch.float32, "there is no gcc"),
        (
            "_width",
            "cpu",
            torch.float32,
            r"this processor has no products of bytes \(AVX-512 VNNI or AVX-VNNI\)",
        ),
    ],
)
def test_where_there_are_none_they_are_asked_for_in_vain(
    setting: str | None, device: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Callable[[], object]] = {"missing": lambda: "there is no gcc", "_width": lambda: 0}
    if setting == "_width" and native.missing() is not None:
        pytest.skip("no compiler: what a processor has is not asked")
    if setting is not None:
        monkeypatch.setattr(coarse, setting, values[setting])
    assert not quantizes("auto", torch.device(device), dtype)
    assert not quantizes("none", torch.device(device), dtype)
    message = f"^draft_quantization is 'int8'; it must be 'auto' or 'none' here: {reason}$"
    with pytest.raises(ValueError, match=message):
        quantizes("int8", torch.device(device), dtype)
    if device == "cpu":
        projection = CoarseProjection(torch.randn(4, 6).to(dtype))
        projection.pack()
        assert projection._coarse is None
        assert isinstance(projection, Projection)
        assert projection(torch.randn(2, 6).to(dtype)).shape == (2, 4)
