"""Norms and activations, by torch's operators and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from bateleur.metadata import native
from bateleur.runner.models.mlp import activation
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.residual import ResidualStream

F32, BF16 = torch.float32, torch.bfloat16
compiles = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no compiler")


@pytest.mark.parametrize("size", [1, 24, 64, 577])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_normalised_each_by_itself(size: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled and (reason := native.unavailable_reason()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(native, "unavailable_reason", lambda: None if compiled else "none is wanted")
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


@compiles
@pytest.mark.parametrize(
    ("stream", "layers", "weights"),
    [(F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (F32, BF16, BF16)],
    ids=str,
)
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 24, 64, 577])
def test_a_sum_and_its_norm_are_rounded_as_often_as_they_are_stored(
    size: int, count: int, stream: torch.dtype, layers: torch.dtype, weights: torch.dtype
) -> None:
    norm = RMSNorm(size, 1e-5, torch.empty(0, dtype=layers), exact=weights != layers)
    norm.weight.copy_(torch.rand(size) + 0.5)
    assert norm.weight.dtype == weights
    h = torch.randn(7, size).to(stream)
    terms = [(torch.randn(7, 2 * size).to(layers)[:, :size], factor) for factor in (1.0, -0.5)[:count]]
    alone, sums = h.clone(), h.double()
    for y, factor in terms:
        sums = (sums + factor * y.double()).to(stream).double()
    together = norm.of_sum(h, terms, layers) if terms else norm(h.to(layers))
    torch.testing.assert_close(h.double(), sums, rtol=2e-7 if stream == F32 else 0, atol=1e-7)
    x = h.to(layers).double()
    want = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert together.dtype == layers
    places = torch.finfo(layers).eps
    torch.testing.assert_close(together.double(), want, rtol=0.501 * places if layers == BF16 else 4 * places, atol=0)
    for t in range(7):
        part = [(y[t : t + 1], factor) for y, factor in terms]
        one = alone[t : t + 1].clone()
        assert torch.equal(norm.of_sum(one, part, layers) if part else norm(one.to(layers)), together[t : t + 1])
        assert torch.equal(one, h[t : t + 1])


WANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "clamped_swiglu": lambda x: x.clamp(max=7) * (1.702 * x.clamp(max=7)).sigmoid(),
    "gelu_tanh": lambda x: x * (2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).sigmoid(),
}


@compiles
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [1, 24, 64, 77])
def test_activations_are_computed_in_float32_and_rounded_once(
    size: int, gated: bool, name: str, dtype: torch.dtype
) -> None:
    wide = (4 * torch.randn(5, 3 * size)).to(dtype)[:, : 2 * size if gated else size]
    wide[1, 0], wide[2, 0], wide[3, 0] = torch.nan, -100.0, 60.0
    y, x = activation(wide, size, name, gated), wide.double()
    want = WANTED[name](x[:, :size])
    want = want * x[:, size:] if gated else want
    if name == "clamped_swiglu":
        if not gated:
            pytest.skip("it has a gate")
        want = WANTED[name](x[:, :size]) * (x[:, size:].clamp(-7, 7) + 1)
    rtol = 5e-6 if dtype == F32 else 0.501 * torch.finfo(dtype).eps  # e to the 25 has 25 times the error of 25
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=1e-30, equal_nan=True)
    assert torch.equal(activation(wide[4:], size, name, gated), y[4:])


@compiles
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gated", [False, True])
def test_silu_of_what_is_far_below_zero_is_nothing(dtype: torch.dtype, gated: bool) -> None:
    """exp(-x) overflows there: the result was x / e^88, which is -1.8 at the end of floats."""
    x = torch.tensor([[-88.0, -88.5, -1e5, -1e37, -3e38, -torch.inf, 3e38] * 5]).to(dtype)
    wide = torch.cat((x, torch.ones_like(x)), 1) if gated else x
    want = F.silu(x.float()).to(dtype)
    assert bool(want[0, 5].isnan())
    torch.testing.assert_close(activation(wide, x.shape[1], "silu", gated), want, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("stream", "layers"), [(F32, F32), (BF16, BF16), (F32, BF16)], ids=str)
def test_what_is_kept_of_a_stream_stays(
    stream: torch.dtype, layers: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, twice in a row, and after what is not kept; layers read the same with and without `keep`."""
    if compiled and (reason := native.unavailable_reason()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(native, "unavailable_reason", lambda: None if compiled else "none is wanted")
    norm = RMSNorm(24, 1e-5, torch.empty(0, dtype=layers))
    norm.weight.copy_(torch.rand(24) + 0.5)
    begin, terms = torch.randn(7, 24).to(stream), [torch.randn(7, 24).to(layers) for _ in range(5)]

    def run(kept: tuple[int, ...]) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        h, seen, looks = ResidualStream(begin.clone(), layers), {}, []
        for index, term in enumerate(terms):
            if index in kept:
                h.keep()
            looks.append(h.normed(norm) if index != 3 else h.read().clone())
            if index in kept:
                seen[index] = h.kept
            h.add(term, 0.5)
        return [*looks, h.normed(norm)], seen

    plain, _ = run(())
    looks, seen = run((0, 2, 3))
    assert all(torch.equal(a, b) for a, b in zip(looks, plain, strict=True))
    sums, want = begin.clone(), []
    for term in terms:
        want.append(sums.to(layers).clone())
        sums.add_(term, alpha=0.5)
    assert all(torch.equal(seen[index], want[index]) for index in (0, 2, 3))
