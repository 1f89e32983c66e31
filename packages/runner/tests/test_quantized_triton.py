"""The Triton form of quantised products against the torch form: interpreted, and compiled for sm_90.

The last test starts the process of the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bateleur.runner.models.quantized import Layout, QuantizedMatrix, Scheme

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.runner.models.kernels import dequantized  # noqa: E402
from bateleur.runner.models.kernels import quantized as kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
half, bf16 = torch.float16, torch.bfloat16
SCHEMES = {
    "F8 blocks": Scheme(Layout.F8, 128),
    "F8 rows": Scheme(Layout.F8, 1 << 20, bf16),
    "F8 blocks of 16": Scheme(Layout.F8, 16, start=8),
    "I8 rows": Scheme(Layout.I8, 1 << 20, bf16, zeros=True),
    "I8 groups": Scheme(Layout.I8, 32, half, zeros=True),
    "I4 groups": Scheme(Layout.I4, 128, bf16),
    "I4 groups of 32": Scheme(Layout.I4, 32, half, zeros=True),
    "I4 cut": Scheme(Layout.I4, 64, half, zeros=True, start=24),
    "I4 act order": Scheme(Layout.I4, 64, half, zeros=True, indexed=True),
    "F4 divided": Scheme(Layout.F4, 16, torch.uint8, divides=True),
    "F4 multiplied": Scheme(Layout.F4, 16, torch.uint8),
    "MX4": Scheme(Layout.MX4, 32, torch.uint8),
    "MX4 cut": Scheme(Layout.MX4, 32, torch.uint8, start=16),
}


def matrix(scheme: Scheme, *shape: int) -> QuantizedMatrix:
    """Random codes and scales, so that weights are about 1."""
    torch.manual_seed(0)
    columns, device = shape[-1], torch.device("cpu")
    made = QuantizedMatrix.empty(scheme, shape, 7 if scheme.indexed else None, device)
    code = torch.randint(0, 256, made.codes.shape).to(torch.uint8)
    if scheme.layout is Layout.F8:
        code[(code & 0x7F) == 0x7F] = 3
    scales = torch.rand(made.scales.shape) + 0.5
    size = {Layout.F8: 100, Layout.I8: 100, Layout.I4: 8}.get(scheme.layout, 1)
    tensors: dict[str, Tensor] = {
        "codes": code.view(made.codes.dtype),
        "scales": (scales / size).to(torch.float8_e4m3fn if scheme.layout is Layout.F4 else scheme.scale_dtype),
    }
    if scheme.layout is Layout.F4:
        tensors["scales"] = tensors["scales"].view(torch.uint8)
        tensors["factors"] = torch.rand(shape[:-1]) + 0.5
    if scheme.layout is Layout.MX4:  # exponents about 0, and the subnormal 2^-127
        tensors["scales"] = torch.randint(124, 128, made.scales.shape).byte()
        tensors["scales"][..., :3, :1] = 0
    if made.zeros is not None:
        tensors["zeros"] = torch.randint(0, 16, made.zeros.shape).to(made.zeros.dtype)
    if made.index is not None:
        tensors["index"] = torch.randint(0, 7, (columns,)).int()
    return replace(made, **tensors)  # type: ignore[arg-type]


def linear(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    found: Tensor = kernels.quantized_linear(x, list(weight.tensors().values()), weight.scheme.key(), bias)
    return found


@interpreted
@pytest.mark.parametrize("many", [256, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_is_that_of_the_rounded_weights(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With unit vectors as tokens the product is the matrix itself, bit for bit."""
    monkeypatch.setattr(kernels, "_MANY", many)
    for rows, columns in ((70, 200), (17, 72)):
        weight = matrix(SCHEMES[name], rows, columns)
        for dtype in (torch.float32, torch.float16):
            wanted = weight.dequantize().to(dtype).T
            assert torch.equal(linear(torch.eye(columns, dtype=dtype)[:13], weight), wanted[:13])
            x, bias = torch.randn(5, columns + 3)[:, :columns].to(dtype), torch.randn(rows).to(dtype)
            exact = x.double() @ wanted.double() + bias.double()
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("workspace", [128 * 128, 1 << 20])
def test_a_matrix_is_dequantised_whole_or_in_parts(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several tiles of tokens, and a band of two tiles of rows and one of the last tile."""
    options = dequantized.tile_options() | {"BAND": 2}
    monkeypatch.setattr(kernels, "_MANY", 4)
    monkeypatch.setattr(dequantized, "WORKSPACE", workspace)
    monkeypatch.setattr(dequantized, "tile_options", lambda: options)
    weight, bias, column = matrix(SCHEMES["I4 groups of 32"], 300, 72), torch.randn(300).half(), torch.arange(140) % 72
    found = linear(torch.eye(72).half()[column], weight, bias)
    assert torch.equal(found, (weight.dequantize().half().float().T[column] + bias.float()).half())


@interpreted
def test_both_conversions_of_e4m3_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(256).byte()
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    weight = replace(matrix(SCHEMES["F8 rows"], 2, 128), codes=codes.view(2, 128), scales=torch.ones(2, 1, dtype=bf16))
    for native in (False, True):
        monkeypatch.setattr(dequantized, "cuda_capability_geq", lambda *_, native=native: native)
        assert torch.equal(linear(torch.eye(128), weight).T, codes.view(torch.float8_e4m3fn).float().view(2, 128))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parts_of_columns_are_summed_in_their_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel adds the parts in one order: `sum_kernel`, one program for all parts, and `dense_kernel`.

    Sums of a part are exact here, because sums in the interpreter depend on the tile. The first and the third part
    cancel, and the rest of the second depends on the order.
    """
    monkeypatch.setattr(kernels, "_PART", 128)
    monkeypatch.setattr(kernels, "_FEW", 2)
    monkeypatch.setattr(kernels, "_MANY", 20)
    weight = matrix(SCHEMES["I4 groups"], 40, 512)
    assert kernels.cut(40, 512) == (4, 128)
    weight.scales.copy_(2.0 ** torch.tensor([12, -12, 12, -12]))
    codes = torch.randint(1, 16, (40, 512)).to(torch.uint8)
    codes[:, 256:384] = 16 - codes[:, :128]
    weight.codes.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
    x, bias = torch.randint(-3, 4, (21, 512)).to(dtype), torch.randn(40).to(dtype)
    x[:, 256:384] = x[:, :128]
    whole = linear(x, weight, bias)
    for few in (1, 2, 3, 20):
        assert torch.equal(linear(x[:few], weight, bias), whole[:few])
    cut = (each.view(-1, 4, 128).transpose(0, 1) for each in (x.float(), weight.dequantize()))
    parts = torch.einsum("ptk,pnk->ptn", *cut)
    assert torch.equal(whole, (((parts[0] + parts[1]) + parts[2]) + parts[3] + bias.float()).to(dtype))
    assert not torch.equal(whole, (((parts[0] + parts[2]) + parts[1]) + parts[3] + bias.float()).to(dtype))


@interpreted
@pytest.mark.parametrize("name", [each for each in SCHEMES if "order" not in each])
def test_groups_of_rows_have_their_experts(name: str) -> None:
    counts, rows, columns = [3, 0, 17, 1], 20, 72
    weight = matrix(SCHEMES[name], 4, rows, columns)
    x, ends = torch.randn(21, columns).half(), torch.tensor(counts).cumsum(0).int()
    found = kernels.quantized_grouped(x, ends, list(weight.tensors().values()), weight.scheme.key())
    first = 0
    for e, count in enumerate(counts):
        for tile in range(first, first + count, 16):
            own = slice(tile, min(tile + 16, first + count))
            assert torch.equal(found[own], linear(x[own], weight.rows(e))), e
        first += count


PUBLISHED = {torch.bfloat16: (5120, 17408), torch.float32: (2048, 2048)}
"""Sizes of matrices of Qwen3.6-27B and of Qwen3.6-35B-A3B."""
ON_SALE = [
    "F8 blocks",
    "F8 rows",
    "I8 rows",
    "I8 groups",
    "I4 groups",
    "I4 groups of 32",
    "I4 act order",
    "F4 divided",
    "MX4",
]


FAST = ("I4 groups", "MX4")
"""Schemes whose bfloat16 kernels the fast tests compile."""
SWEEP = (pytest.mark.slow, pytest.mark.published_sizes)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, name, marks=() if name in FAST and dtype == torch.bfloat16 else SWEEP)
        for dtype in (torch.bfloat16, torch.float32)
        for name in ON_SALE
    ],
)
def test_launches_compile_for_hopper(name: str, dtype: torch.dtype) -> None:
    """Of published sizes: no spills, and as many blocks of a multiprocessor as the kernels promise."""
    from sm90 import compiling, faults_of

    scheme = SCHEMES[name]
    with compiling() as found:
        weight = QuantizedMatrix.empty(scheme, PUBLISHED[dtype], None, torch.device("cpu"))
        for tokens in (1, 17, 1024):
            linear(torch.empty(tokens, weight.columns, dtype=dtype), weight)
        if not scheme.indexed:
            experts = QuantizedMatrix.empty(scheme, (8, 1024, 2048), None, torch.device("cpu"))
            for tokens in (8, 1024, 8192):
                ends, x = torch.empty(8, dtype=torch.int32), torch.empty(tokens, 2048, dtype=dtype)
                kernels.quantized_grouped(x, ends, list(experts.tensors().values()), scheme.key())
    many = {"dequantize_kernel", "dense_kernel"} if dtype == torch.bfloat16 else set()
    assert {each.name for each in found.kernels} == {"linear_kernel", "sum_kernel", *many} | (
        set() if scheme.indexed else {"grouped_kernel"}
    )
    for kernel in found.kernels:
        assert not (faults := faults_of(kernel)), (str(kernel), faults)
        if kernel.name == "dense_kernel":
            waits = [line.split()[-1] for line in kernel.sass if "WARPGROUP.DEPBAR" in line]
            assert waits.count("0x1") == 1, "products of tiles overlap"
        if dtype == torch.bfloat16 and kernel.name not in ("sum_kernel", "dequantize_kernel"):
            assert kernel.instructions["wgmma"], f"{kernel}: every tile has the instructions of the others"


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
