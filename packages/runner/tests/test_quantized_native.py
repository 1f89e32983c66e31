"""Products with int8 and int4 codes in C: the bits of products with the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from test_quantized_triton import SCHEMES, matrix

from bateleur.metadata.native import unavailable_reason
from bateleur.runner.models import native, quantized
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.native.quantized import PackedMatrix
from bateleur.runner.models.quantized import Layout

compiled = pytest.mark.skipif(unavailable_reason() is not None, reason="there is no compiler")
NAMES = [name for name, each in SCHEMES.items() if each.layout in (Layout.I8, Layout.I4)]


@compiled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_dequantised_matrix(name: str, bias: bool) -> None:
    """Of any number of tokens, with a last panel and a last word that are not full, packed for the kernels or not."""
    for rows, columns in ((70, 200), (300, 1000), (5, 96), (97, 77)):
        quantised, b = matrix(SCHEMES[name], rows, columns), torch.randn(rows) if bias else None
        plain, kept = Projection(quantised.dequantize(), b), Projection.of(quantised, torch.float32)
        kept.bias = b
        x = torch.randn(70, columns + 5)[:, :columns]
        before = kept(x)
        for each in (plain, kept):
            each.pack()
        cut = SCHEMES[name].start != 0 or SCHEMES[name].indexed
        assert kept.in_another_layout != cut, "groups that start outside of the matrix have no kernel"
        assert torch.equal(kept.weight, plain.weight)
        wanted = plain(x)
        assert torch.equal(before, wanted)
        for tokens in (1, 2, 3, 4, 5, 9, 16, 64, 70):
            assert torch.equal(kept(x[:tokens]), wanted[:tokens]), tokens


@compiled
def test_other_types_keep_their_layout() -> None:
    """bfloat16 tokens are multiplied with weights that are rounded to bfloat16; FP8 and NVFP4 have no kernel in C."""
    assert PackedMatrix.of(matrix(SCHEMES["I8 groups"], 16, 64), torch.bfloat16) is None
    for name in ("F8 rows", "F4 divided"):
        assert PackedMatrix.of(matrix(SCHEMES[name], 16, 64), torch.float32) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_without_a_compiler_a_token_has_the_same_bits_beside_any(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "packs", lambda weight: False)
    monkeypatch.setattr(quantized, "_TILE", 1000)
    weight, bias, x = matrix(SCHEMES[name], 70, 200), torch.randn(70), torch.randn(9, 200)
    whole = weight.product(x, bias)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4)
    for few in (1, 2, 5):
        assert torch.equal(weight.product(x[:few], bias), whole[:few])
