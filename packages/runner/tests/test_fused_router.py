"""Routing, sorting and summing of experts: Triton compared with torch, and compiled for sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.metadata.dispatch import load
from bateleur.runner.models import router
from bateleur.runner.models.operators import FORMS
from bateleur.runner.models.spec import RouterSpec

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.runner.models.kernels import router as kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
GROUPED = RouterSpec(scores="sigmoid", corrected=True, sum_eps=1e-20, scale=2.5, num_groups=3, top_groups=2)
ROUTERS = {
    "softmax": RouterSpec(),
    "softmax as it is": RouterSpec(normalised=False),
    "groups": GROUPED,
    "corrected": RouterSpec(scores="sigmoid", corrected=True, sum_eps=1e-6),
    "sigmoid": RouterSpec(scores="sigmoid", normalised=False, scale=0.5),
}


def by_triton(name: str) -> Any:
    """The Triton form of an operator."""
    return load(FORMS[name].triton or "")


def routed(spec: RouterSpec, logits: Tensor, top_k: int, correction: Tensor | None, form: Any) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "route_tokens", form)
        return router.route(logits, spec, top_k, correction)


@interpreted
@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
def test_a_router_says_what_its_torch_form_says(spec: RouterSpec) -> None:
    """NaN stays in its token's weights, and no expert is chosen twice."""
    generator = torch.Generator().manual_seed(0)
    for num_tokens, top_k, experts in ((0, 2, 6), (4, 1, 12), (7, 8, 12)):
        logits = torch.randn(num_tokens, experts + 3, generator=generator).mul_(3)[:, :experts]
        correction = torch.randn(experts, generator=generator) if spec.corrected else None
        args = logits, top_k, correction
        weights, chosen = routed(spec, *args, by_triton("route_tokens"))
        wanted, best = routed(spec, *args, FORMS["route_tokens"].torch)
        assert (weights.dtype, chosen.dtype) == (wanted.dtype, best.dtype)
        assert torch.equal(chosen, best)
        torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-7)
        if num_tokens:
            logits[1, 5:7] = torch.tensor([torch.nan, -torch.nan])
            again, chosen = routed(spec, *args, by_triton("route_tokens"))
            rest = [0, *range(2, num_tokens)]
            assert torch.equal(again[rest], weights[rest])
            assert again[1].isnan().any()
            assert len(set(chosen[1].tolist())) == top_k
            assert set(chosen[1].tolist()) < {*range(experts)}


@interpreted
def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    """The same for groups; minus infinity is a logit like others."""
    logits = torch.tensor([[0.0] * 6, [-torch.inf] * 5 + [1.0], [2.0, 2.0, -3.0, 2.0, 2.0, 40.0]])
    for spec in (RouterSpec(), RouterSpec(scores="sigmoid", num_groups=3, top_groups=2)):
        weights, experts = routed(spec, logits, 3, None, by_triton("route_tokens"))
        assert experts.tolist() == [[0, 1, 2], [5, 0, 1], [5, 0, 1]]
        assert weights[0].tolist() == pytest.approx([1 / 3] * 3)


@interpreted
def test_places_are_sorted_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more places than a tile, for none, and with experts without tokens."""
    monkeypatch.setitem(kernels.SORT_OPTIONS, "BLOCK_S", 16)
    generator = torch.Generator().manual_seed(0)
    for num_tokens, top_k in ((0, 2), (1, 3), (15, 3)):
        experts = (
            torch.stack([torch.randperm(5, generator=generator)[:top_k] for _ in range(num_tokens)])
            if (num_tokens)
            else torch.empty(0, top_k, dtype=torch.int64)
        )
        found = by_triton("sort_places")(experts, 7)
        for mine, theirs in zip(found, FORMS["sort_places"].torch(experts, 7), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("beside", ["nothing", "shared", "gated"])
def test_a_token_is_the_sum_of_its_experts(dtype: torch.dtype, beside: str) -> None:
    """NaN of one token does not reach others."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for num_tokens, size in ((0, 24), (5, 600)):
        weights, experts = torch.rand(num_tokens, 3), torch.randint(4, (num_tokens, 3))
        places = FORMS["sort_places"].torch(experts, 4)[1]
        y = random(num_tokens * 3, size)
        shared = None if beside == "nothing" else random(num_tokens, size + 8)[:, :size]
        gate = random(num_tokens, 1) if beside == "gated" else None
        wanted = FORMS["combine"].torch(y, places, weights, shared, gate)
        found = by_triton("combine")(y, places, weights, shared, gate)
        assert found.dtype == dtype
        tolerance = 4e-3 if dtype == torch.float16 else 2e-6
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        if num_tokens:
            y[places[4]] = torch.nan
            again = by_triton("combine")(y, places, weights, shared, gate)
            assert again[1].isnan().all()
            assert torch.equal(again[[0, 2, 3, 4]], found[[0, 2, 3, 4]])


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == len(ROUTERS) + 2 + 6
