"""Memory of an engine compared with its plan and with `bateleur info`, and what still runs in little memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.eagle import EagleSpeculator
from bateleur.eagle.heads.layers import Rotary
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_draft, shipped_model
from bateleur.runner.diagnose.checkpoint_facts import describe_checkpoint
from eagle_doubles.drafters import RandomDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)  # passes three boundaries of 8 tokens
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 1, "block_size": 4}


def allocated(llm: LLM) -> int:
    """Bytes of all tensors that the plan includes."""
    caches, drafting = llm.engine.caches, llm.engine.runner.proposer
    tensors = [tensor for pair in caches.kv for tensor in pair]
    if drafting is not None and isinstance(drafting.drafter, EagleSpeculator):
        tensors += [tensor for pair in drafting.drafter.kv for tensor in pair]
        kept = drafting.drafter.inputs.logits
        tensors += [] if kept is None else [kept.lines]
    return sum(tensor.nbytes for tensor in tensors) + (0 if caches.pool is None else caches.pool.nbytes)


def peak_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most pages that a request holds while it runs, counted when they are allocated."""
    states, held = llm.engine.scheduler.states, [0]
    if states is None:
        assert llm.cache_plan.layout is not None
        return llm.cache_plan.layout.columns()
    allocate = states.allocate_blocks

    def counted(*step: Any) -> None:
        allocate(*step)
        held.append(states.pool.capacity - states.pool.num_free)

    monkeypatch.setattr(states, "allocate_blocks", counted)
    llm.generate([{"prompt_token_ids": [5, 6, 7] * 11}], SHORT)
    return max(held)


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize(
    ("mode", "retention"), [("none", None), *product(("align", "all"), (None, "all", "none", "last+prompt_end"))]
)
def test_info_says_what_a_running_request_holds(
    make_llm: Callable[..., LLM],
    sized: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tiny_hybrid: Path,
    mode: str,
    policy: str,
    k: int,
    retention: str | None,
) -> None:
    """The pool has exactly what one row needs; compares tensor sizes and the most pages that its request takes."""
    settings = SIZES | {"mamba_cache_mode": mode, "mamba_state_policy": policy}
    if mode != "none":
        settings |= {"enable_prefix_caching": True, "mamba_block_size": 8, "mamba_retention": retention}
    if k:  # wrong drafts: steps cross boundaries and are rejected
        settings |= {"num_speculative_tokens": k, "drafter": RandomDrafter(k, 97)}
    llm = sized(make_llm, num_blocks=40, model=tiny_hybrid, **settings)
    facts = describe_checkpoint(tiny_hybrid, dtype="float32", **settings)
    assert llm.engine.caches.pool is not None
    row = llm.cache_plan.costs.row_bytes
    page, most = facts["mamba_page_bytes"], facts["mamba_state_bytes_per_request"]
    assert llm.engine.caches.pool.nbytes == page + row + most
    assert peak_pages(llm, monkeypatch) * page + row == most
    assert facts["kv_bytes_per_token"] * 40 * 4 == llm.cache_plan.kv_bytes


def weights_of(part: object, seen: set[int]) -> list[torch.Tensor]:
    """All tensors of an object, once each, except position tables and epsilons of norms."""
    if id(part) in seen or isinstance(part, Rotary):
        return []
    seen.add(id(part))
    if isinstance(part, torch.Tensor):
        return [part] if part.numel() > 1 else []
    if isinstance(part, list | tuple):
        return [weight for each in part for weight in weights_of(each, seen)]
    names = [*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ())]
    return [weight for name in names for weight in weights_of(getattr(part, name), seen)]


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("head", ["random", "auto"])
def test_info_counts_a_draft_head(
    make_llm: Callable[..., LLM], random_head: Path, monkeypatch: pytest.MonkeyPatch, head: str, rule: str
) -> None:
    """Weights that are not shared with the target, keys and values, and draft logits."""
    if head == "auto" and not shipped_draft().is_dir():
        pytest.skip("there is no shipped head")
    settings = SIZES | {"max_num_seqs": 3, "num_speculative_tokens": 3, "speculative_rule": rule}
    settings |= {"draft": random_head if head == "random" else "auto", "cudagraph_backend": "recorded"}
    settings |= {"cudagraph_capture_sizes": [4, 12]}
    # Not packed: our packing pads the last panel, and oneDNN's is not used under graphs.
    monkeypatch.setattr("bateleur.runner.models.native.packs", lambda weight: False)
    llm = make_llm(cudagraph_mode="FULL_DECODE_ONLY", **settings)
    drafting = llm.engine.runner.proposer
    assert drafting is not None
    assert isinstance(drafting.drafter, EagleSpeculator)
    shared = {id(weight) for weight in llm.engine.model.weights().values()}
    weights = sum(weight.nbytes for weight in weights_of(drafting.drafter.head, shared))
    facts = describe_checkpoint(shipped_model(), dtype="float32", **settings)
    plain = describe_checkpoint(shipped_model(), dtype="float32", **SIZES)
    assert facts["parts"]["draft head"]["weight_bytes"] == weights
    assert facts["weight_bytes"] == plain["weight_bytes"] + facts["parts"]["draft head"]["weight_bytes"]
    cells = llm.cache_plan.num_blocks * llm.cache_plan.block_size
    kv = sum(tensor.nbytes for pair in drafting.drafter.kv for tensor in pair)
    assert (facts["kv_bytes_per_token"] - plain["kv_bytes_per_token"]) * cells == kv
    laws = drafting.drafter.inputs.logits
    assert facts["draft_logits_bytes_per_request"] == (0 if laws is None else 3 * laws.lines[0].nbytes)


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [12_000_000, 40_000_000])
def test_a_budget_counts_every_tensor(
    make_llm: Callable[..., LLM], random_head: Path, rule: str, policy: str, share: bool, budget: int
) -> None:
    """Keys and values of target and head, pages, rings, and the draft logits that rules need."""
    settings = SIZES | {"max_num_seqs": 3, "enable_prefix_caching": share, "mamba_state_policy": policy}
    settings |= {"draft": random_head, "num_speculative_tokens": 3, "speculative_rule": rule}
    llm = make_llm(kv_cache_memory_bytes=budget, **settings)
    plan = llm.cache_plan
    assert allocated(llm) == plan.total_bytes <= budget
    assert plan.draft_bytes == (0 if rule == "coupled" else (3 * 3 + 1) * (4096 // 8) * 4)


def prompt_of(*parts: int) -> dict[str, Any]:
    """A prompt of so many tokens in each part; equal parts at equal places are equal."""
    tokens: list[int] = []
    for index, length in enumerate(parts):
        tokens += np.random.default_rng((index, length)).integers(3, 4000, length).tolist()
    return {"prompt_token_ids": tokens}


@pytest.mark.parametrize("policy", ["slots", "fold"])
def test_64_shared_tokens_are_a_hit(make_llm: Callable[..., LLM], policy: str) -> None:
    """With defaults and long requests, the hit is the largest power of two within the shared prefix."""
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 2, "mamba_state_policy": policy}
    llm = make_llm(enable_prefix_caching=True, **settings)
    plain = make_llm(**settings)
    shared = {64: 64, 70: 64, 190: 128, 300: 256}
    for length, tokens in shared.items():
        for tail in (500, 30, 5):
            asked = prompt_of(length, tail)
            (output,) = llm.generate([asked], FIVE)
            assert output.num_cached_tokens == (0 if tail == 500 else tokens), (length, tail)
            assert output.outputs[0].token_ids == plain.generate([asked], FIVE)[0].outputs[0].token_ids


def test_a_conversation_goes_on_where_it_was(make_llm: Callable[..., LLM]) -> None:
    """The states at the end of a prompt and at the newest boundary are kept, however sparse the pages of long prompts
    are.
    """
    llm = make_llm(max_model_len=2048, max_num_seqs=2, enable_prefix_caching=True)
    assert llm.cache_plan.costs.retention is not None
    assert llm.cache_plan.costs.retention.every > 64
    (first,) = llm.generate([asked := prompt_of(700)], GREEDY)
    told = asked["prompt_token_ids"] + first.outputs[0].token_ids
    (again,) = llm.generate([asked], GREEDY)
    (second,) = llm.generate([{"prompt_token_ids": [*told, 5, 6]}], GREEDY)
    assert (again.num_cached_tokens, second.num_cached_tokens) == (640, 704)


def test_the_longest_request_runs_in_any_budget_that_it_ran_in(make_llm: Callable[..., LLM]) -> None:
    """From the smallest possible budget on, if need be with fewer rows, and without prefix caching for one row."""
    longest = prompt_of(120)
    wanted = make_llm(**SIZES).generate([longest], GREEDY)[0].outputs[0].token_ids
    for rows in (1, 2, 5):
        settings = SIZES | {"max_num_seqs": rows, "mamba_state_policy": "fold"}
        costs = make_llm(**settings).cache_plan.costs
        least = costs.fixed_bytes(rows) + 33 * 4 * costs.token_bytes
        seen = set()
        for budget in range(least, least + 3 * costs.page_bytes, costs.page_bytes // 2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                llm = make_llm(kv_cache_memory_bytes=budget, enable_prefix_caching=True, **settings)
            plan = llm.cache_plan
            seen.add((plan.share_prefixes, llm.limits.max_num_seqs))
            assert bool(said) == (not plan.share_prefixes or plan.max_num_seqs < rows)
            outputs = llm.generate([longest] * 3, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == [wanted] * 3
        assert seen == {1: {(False, 1), (True, 1)}, 2: {(True, 1), (True, 2)}, 5: {(True, 2), (True, 3)}}[rows]
