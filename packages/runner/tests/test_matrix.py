"""Packed matrices: equal products, bit for bit in any batch, compiled or by oneDNN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.models import native
from bateleur.runner.models.matrix import _FEW_TOKENS, Projection, _padded

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
compiles = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no compiler")
uncompiled = pytest.fixture(lambda monkeypatch: monkeypatch.setattr(native, "packs", lambda _: False))


def made(rows: int = 513, columns: int = 260, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> Projection:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(columns, rows, generator=generator, dtype=dtype).t()
    return Projection(weight, torch.randn(rows, generator=generator, dtype=dtype) if bias else None)


@packs
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33, 130])
def test_packed_products_are_those_of_torch(tokens: int, bias: bool) -> None:
    projection = made(bias=bias)
    weight, x = projection.weight, torch.randn(tokens, 2 * 260)[:, ::2]
    want = F.linear(x.double(), weight.double(), None if projection.bias is None else projection.bias.double())
    projection.pack()
    torch.testing.assert_close(projection(x).double(), want, rtol=1e-5, atol=1e-4)
    assert projection.weight is not weight, "the first layout is not kept"
    assert torch.equal(projection.weight, weight)
    projection.pack()
    assert torch.equal(projection.weight, weight)


def test_packed_products_come_in_few_sizes_that_waste_little() -> None:
    """oneDNN keeps a kernel for each size; 1, 2, 4, 8 or 16 rows with four drafts each are among the sizes."""
    sizes = [_padded(tokens) for tokens in range(8193)]
    assert all(tokens <= size <= max(tokens * 5 // 4, _FEW_TOKENS) for tokens, size in enumerate(sizes) if tokens)
    assert len(set(sizes)) == (49 if _FEW_TOKENS == 1 else 38)
    assert all(_padded(rows * 5) == max(rows * 5, _FEW_TOKENS) for rows in (1, 2, 4, 8, 16))


@packs
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="seen with AVX-512 only")
@pytest.mark.usefixtures("uncompiled")
def test_a_token_is_rounded_alike_beside_any_others() -> None:
    """The BLAS computes other sums for one token than for many, and drafts are verified many at a time."""
    projection, x = made(4096, 256), torch.randn(129, 256)
    projection.pack()
    together = projection(x)
    for tokens in (1, 2, 3, 5, 8, 9, 17, 20, 33, 64, 80, 100):
        assert torch.equal(projection(x[:tokens]), together[:tokens])


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(513, 260), (64, 64), (7, 30), (128, 2)])
def test_compiled_products_are_exact_to_a_rounding_and_alike_beside_any_others(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    projection = made(rows, columns, dtype)
    weight, x = projection.weight, torch.randn(26, 2 * columns, dtype=dtype)[:, ::2]
    projection.pack(recorded=True)
    assert projection.weight is not weight
    assert torch.equal(projection.weight, weight)
    together = projection(x)
    bias = projection.bias
    assert bias is not None
    want = F.linear(x.double(), weight.double(), bias.double())
    error = (together.double() - want).abs()
    sums = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    ulp = torch.finfo(dtype).eps
    assert (error <= 0.5001 * ulp * want.abs() + columns * 2.0**-24 * sums).all()
    for tokens in range(26):
        assert torch.equal(projection(x[:tokens]), together[:tokens])
        assert torch.equal(projection(x[tokens:].contiguous()), together[tokens:])


@compiles
def test_numbers_that_bfloat16_rounds_to_infinity_and_infinities_are_multiplied_as_by_torch() -> None:
    weight = torch.randn(7, 64).bfloat16().float()
    weight[3, 5] = 0.0
    x = torch.full((4, 64), torch.finfo(torch.float32).max / 4096)
    x[1, 5], x[2, 40], x[3, 2] = torch.inf, -torch.inf, torch.finfo(torch.float32).max
    projection = Projection(weight)
    projection.pack()
    torch.testing.assert_close(projection(x), F.linear(x, weight), equal_nan=True, rtol=1e-5, atol=1e33)


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_columns_and_groups_of_tokens_change_no_bit(dtype: torch.dtype) -> None:
    """Panels of so many columns are processed in parts, and so many tokens in groups."""
    projection, x = made(50, 2800, dtype), torch.randn(131, 2800, dtype=dtype)
    bias = projection.bias
    assert bias is not None
    want = F.linear(x.double(), projection.weight.double(), bias.double())
    projection.pack()
    together = projection(x)
    torch.testing.assert_close(together.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-3)
    for first, last in ((0, 1), (0, 64), (63, 66), (1, 131), (130, 131)):
        assert torch.equal(projection(x[first:last]), together[first:last])


@compiles
@pytest.mark.parametrize("columns", [64, 2800])
def test_matrices_of_a_bfloat16_checkpoint_take_half_the_memory_and_are_as_exact(columns: int) -> None:
    weight, bias = torch.randn(70, columns).bfloat16().float(), torch.randn(70)
    kept, x = Projection(weight, bias), torch.randn(19, columns)
    kept.pack()
    assert kept._native is not None
    assert kept._native.dtype == torch.bfloat16
    assert torch.equal(kept.weight, weight)
    assert kept.weight.dtype == torch.float32
    together = kept(x)
    assert all(torch.equal(kept(x[t : t + 3]), together[t : t + 3]) for t in range(17))
    wide = native.product(x, native.pack(weight), bias, 70)
    assert torch.equal(together, wide)
    product = kept.in_c
    assert product is not None
    assert product.columns == columns
    with pytest.raises(ValueError, match=r"columns of torch\.float32$"):
        kept(x.bfloat16())


@pytest.mark.parametrize("value", [1.0 + 2.0**-8, -3e-42, 3.14])
def test_one_number_more_than_bfloat16_holds_keeps_a_matrix_in_float32(value: float) -> None:
    weight = torch.randn(1030, 8).bfloat16().float()
    assert native.narrowed(weight.t().contiguous().t()).dtype == torch.bfloat16
    assert native.narrowed(weight[:, :7]).dtype == torch.float32
    weight[1027, 3] = value
    assert native.narrowed(weight) is weight


@compiles
def test_nan_and_infinity_stay_in_their_row() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        projection = made(70, 8, dtype)
        projection.pack()
        x = torch.ones(3, 8, dtype=dtype)
        alone = projection(x)
        x[1, 3] = torch.nan
        assert projection(x)[1].isnan().all()
        assert torch.equal(projection(x)[::2], alone[::2])


@compiles
def test_compiled_products_are_computed_by_several_threads_alike() -> None:
    projection, x = made(1030, 300), torch.randn(9, 300)
    projection.pack()
    alone = projection(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(projection(x), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "projection", [made(64, 64), made(dtype=torch.float64), made(dtype=torch.bfloat16)], ids=["few", "f64", "bf16"]
)
def test_others_stay_as_they_are(projection: Projection) -> None:
    weight = projection.weight
    projection.pack()
    assert projection.weight is weight
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
    assert torch.equal(projection(x), F.linear(x, weight, projection.bias))


@compiles
@pytest.mark.parametrize("x", [torch.zeros(3, 60), torch.zeros(3, 64, dtype=torch.bfloat16)])
def test_tokens_that_do_not_fit_a_packed_matrix_are_refused(x: Tensor) -> None:
    """Nothing is read after their end."""
    projection = Projection(torch.randn(100, 64))
    projection.pack()
    with pytest.raises(ValueError, match=r"^x is \(3, 6\d\) torch\.\w+; it must have 64 columns of torch\.float32$"):
        projection(x)
