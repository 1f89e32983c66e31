"""A whole step on graphs: forward pass, verification with the commit, and the proposal, a replay each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.sampling.step_end import EndWhy

GRAPHS = {
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 3, 8],
    "cudagraph_checks": "PARANOID",
}
SIZES = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 3, "block_size": 4}
PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 8}
PROMPTS = [[5, 7, 9, 7, 9], [11] * 14, [3]]
DRAWS = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 9, "min_p": 0.02},
]


def params(kinds: Sequence[dict[str, Any]], **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**({"seed": 7 + i, "max_tokens": 18 - 5 * i, "ignore_eos": True} | kind | more))
        for i, kind in enumerate(kinds)
    ]


def tokens(llm: LLM, asked: list[SamplingParams]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in llm.generate(prompts, asked)]


@pytest.fixture(scope="module")
def make(tiny_hybrid: Path, tiny_head: Path, tiny_mtp: Path) -> Callable[..., LLM]:
    def made(draft: str | None = None, **settings: Any) -> LLM:
        model = tiny_mtp if draft == "mtp" else tiny_hybrid
        if draft is not None:
            settings["draft"] = tiny_head if draft == "head" else draft
        return LLM(model, **(SIZES | settings))

    return made


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM]) -> Callable[[bool, bool], list[list[int]]]:
    """What eager engines without drafts say, of either model, drawn or greedily."""
    known: dict[tuple[bool, bool], list[list[int]]] = {}

    def said(mtp: bool, greedy: bool) -> list[list[int]]:
        if (mtp, greedy) not in known:
            llm = make("mtp", draft_policy={1: 0}, num_speculative_tokens=2) if mtp else make()
            for each in (False, True):
                kinds = [{"temperature": 0.0}] * 3 if each else DRAWS
                known[mtp, each] = tokens(llm, params(kinds))
        return known[mtp, greedy]

    return said


CASES = {
    "no-drafts": {},
    "no-drafts-prefixes": PREFIXES,
    "head-fold": {"draft": "head", "num_speculative_tokens": 2, "mamba_state_policy": "fold"},
    "head-slots-prefixes": {"draft": "head", "num_speculative_tokens": 2, "mamba_state_policy": "slots"}
    | PREFIXES,
    "mtp-fold-prefixes": {"draft": "mtp", "num_speculative_tokens": 2, "mamba_state_policy": "fold"}
    | PREFIXES,
    "ngram-slots": {"draft": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1},
}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "async"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_eager_plain_decoding(
    make: Callable[..., LLM], plain: Callable[[bool, bool], list[list[int]]], case: str, ahead: bool
) -> None:
    llm = make(**CASES[case], **GRAPHS, async_scheduling=ahead)
    for greedy in (False, True):
        kinds = [{"temperature": 0.0}] * 3 if greedy else DRAWS
        assert tokens(llm, params(kinds)) == plain(case.startswith("mtp"), greedy)
    ends = llm.engine.ends.by_why
    assert set(ends) == {EndWhy.GRAPH, EndWhy.FORWARD}
    assert ends[EndWhy.GRAPH] > 10
