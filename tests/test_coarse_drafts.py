"""Heads in eight bits: other drafts, hardly fewer of them accepted, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import DraftContext, EagleSpeculator
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.diagnose.costs import describe
from bateleur.runner.models.coarse import CoarseProjection
from bateleur.runner.models.native import coarse

REASON = coarse.why_not(torch.device("cpu"), torch.float32)
multiplies = pytest.mark.skipif(REASON is not None, reason=f"no products of eight bits: {REASON}")
PROMPTS = ["import os\n", "def fibonacci(n):", "class Stack:\n    def __init__(self", "for line in open("]
TEMPERATURES = (0.0, 0.8, 0.0, 1.3)
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=120, ignore_eos=True) for i, t in enumerate(TEMPERATURES)
]


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    settings: dict[str, Any] = {"model": None, "max_model_len": 256, "max_num_seqs": 3}
    return partial(make_llm, **settings)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def speculator_of(llm: LLM) -> EagleSpeculator:
    proposer = llm.engine._proposer
    assert proposer is not None
    assert isinstance(proposer.drafter, EagleSpeculator)
    return proposer.drafter


def is_coarse(llm: LLM) -> bool:
    """All of a head but what reads the target's features as they are."""
    head: Any = speculator_of(llm).head
    layer = head.first.layer
    products = [head.vocabulary.output, layer.attention.qkv_proj, layer.attention.o_proj]
    kinds = {
        isinstance(each, CoarseProjection) for each in (*products, layer.mlp.up_proj, layer.mlp.down_proj)
    }
    assert len(kinds) == 1
    assert not isinstance(head.fc, CoarseProjection)
    return kinds.pop()


@multiplies
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True},
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"},
    ],
)
def test_tokens_are_the_same_and_hardly_fewer_drafts_accepted(
    make_llm: Callable[..., LLM], settings: dict[str, Any]
) -> None:
    plain, rates = tokens_of(make_llm(**settings)), {}
    for quantization in ("none", "int8", "auto"):
        llm = make_llm(draft="auto", draft_quantization=quantization, **settings)
        assert is_coarse(llm) == (quantization != "none")
        assert tokens_of(llm) == plain
        rates[quantization] = llm.get_metrics().tokens_per_step
    assert rates["auto"] == rates["int8"]
    assert rates["int8"] > 0.95 * rates["none"]


@multiplies
@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.filterwarnings("ignore:draft_policy")
def test_laws_of_coarse_drafts_are_their_own(make_llm: Callable[..., LLM], rule: str) -> None:
    """Greedy requests are those of plain decoding, and drawn ones have the target's law, whatever the drafts'."""
    plain = tokens_of(make_llm())
    llm = make_llm(draft="auto", draft_quantization="int8", speculative_rule=rule)
    found = tokens_of(llm)
    assert [found[0], found[2]] == [plain[0], plain[2]]
    assert llm.get_metrics().tokens_per_step > 1.5


@multiplies
def test_chains_in_c_draft_what_the_passes_draft(make_llm: Callable[..., LLM]) -> None:
    """But for numbers that lie in the middle between two, and are rounded by the last bit of a norm."""
    llm, equal = make_llm(draft="auto", draft_least_chance=0), list[Tensor]()
    drafter = speculator_of(llm)
    native, propose = drafter._native, drafter.propose
    assert native is not None

    def both(context: DraftContext) -> Tensor:
        context = replace(context, num_drafts=4, least_chance=0.0, room=None)
        drafter._native = None
        expected = propose(context).clone()
        drafter._native = native
        drafts = propose(context).clone()
        equal.append((drafts == expected).flatten())
        return drafts

    drafter.propose = both  # type: ignore[method-assign]
    tokens_of(llm)
    found = torch.cat(equal)
    assert len(found) > 400
    assert found.float().mean() > 0.95


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"draft": None}, "'auto' or 'none' without a draft head in a folder of its own"),
        ({"draft": "ngram"}, "'auto' or 'none' without a draft head in a folder of its own"),
        ({"draft": "mtp"}, "'auto' or 'none' without a draft head in a folder of its own"),
        (
            {"draft": "auto", "dtype": "bfloat16"},
            "'auto' or 'none' here: products of eight bits take tokens in float32, not in bfloat16",
        ),
    ],
)
def test_what_cannot_be_is_refused(make_llm: Callable[..., LLM], settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^draft_quantization is 'int8'; it must be {rule}$"):
        make_llm(draft_quantization="int8", **settings)


@multiplies
def test_what_a_head_is_multiplied_in_is_told() -> None:
    shipped = shipped_model()
    for more, told in (({}, "int8"), ({"draft_quantization": "none"}, None), ({"dtype": "bfloat16"}, None)):
        facts = describe(shipped, device="cpu", draft="auto", **more)
        assert facts.draft_quantization == told
        assert ("draft head's matrices      int8" in facts.table()) == (told is not None)
    assert describe(shipped, device="cpu").draft_quantization is None
    with pytest.raises(ValueError, match=r"^draft_quantization is 'int8'; .* not in bfloat16$"):
        describe(shipped, device="cpu", draft="auto", dtype="bfloat16", draft_quantization="int8")
