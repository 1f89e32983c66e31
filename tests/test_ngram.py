"""Prompt lookup in the engine generates the tokens of plain decoding, for hybrids too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.config.engine_config import EngineConfig

VOCAB = 4096
SETTINGS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
LOOKUP: dict[str, Any] = {"draft": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def repeated(seed: int, period: int, length: int) -> dict[str, Any]:
    random = Random(seed)
    once = [random.randint(3, VOCAB - 1) for _ in range(period)]
    return {"prompt_token_ids": (once * length)[:length]}


PROMPTS = [repeated(1, 5, 24), repeated(2, 9, 21), repeated(3, 1, 1), repeated(4, 2, 16), repeated(5, 30, 9)]
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=17 + 4 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.0, 0.3, 0.8))
]


class Chance(Exception):
    """An error that the model raises at times."""


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(make_llm: Callable[..., LLM]) -> list[list[int]]:
    """Outputs without caching and chunks, one request at a time."""
    llm = make_llm(**SETTINGS | {"max_num_seqs": 1, "mamba_state_policy": "slots"})
    return ids(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(("policy", "mode"), [*product(("slots", "fold"), ("none", "align", "all"))])
def test_39273_a_hybrid_keeps_its_states_through_accepted_and_rejected_lookups(
    make_llm: Callable[..., LLM], plain: list[list[int]], policy: str, mode: str
) -> None:
    shared = {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
    options = SETTINGS | LOOKUP | {"mamba_state_policy": policy, "max_num_batched_tokens": 17}
    llm = make_llm(**options | (shared if mode != "none" else {}))
    for _ in range(2):  # the second time with prefix hits
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain
    stats = llm.get_metrics()
    assert (stats.num_cached_tokens > 0) == (mode != "none")
    tried, kept = stats.acceptance.tried, stats.acceptance.kept
    assert 0 < kept[0] < tried[0]
    assert kept[-1] > 0, "whole lookups are accepted"


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_39273_so_do_those_with_other_states(tiny: Callable[[str], Path], family: str, mode: str) -> None:
    """With nine tokens, each follows another often enough that lookups are sometimes right."""
    folder = tiny(family, vocab_size=9)
    prompts = [{"prompt_token_ids": [(i * i + seed) % 7 for i in range(24)]} for seed in range(4)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=18, ignore_eos=True)
        for i, t in enumerate((0.0, 0.4, 0.0, 0.2))
    ]
    options = SETTINGS | {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    wanted = ids(LLM(folder, **options | {"max_num_seqs": 1}).generate(prompts, params))
    shared = {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
    llm = LLM(folder, **options | LOOKUP | shared | {"max_num_batched_tokens": 17})
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == wanted
    stats = llm.get_metrics()
    assert stats.num_cached_tokens > 0
    assert 0 < stats.acceptance.kept[0] < stats.acceptance.tried[0]


def test_on_graphs_and_through_preemption(
    make_llm: Callable[..., LLM], sized: Callable[..., LLM], plain: list[list[int]]
) -> None:
    options = SETTINGS | LOOKUP | {"enable_prefix_caching": True, "mamba_block_size": 8}
    graphs = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [4, 8, 16],
        "cudagraph_checks": "PARANOID",
    }
    llm = sized(make_llm, 22, 8, **options, **graphs)
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain
    stats = llm.get_metrics()
    assert stats.num_preemptions > 0
    assert stats.acceptance.kept[-1] > 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_lookup_is_a_point_mass_of_the_tokens_alone(
    make_llm: Callable[..., LLM], sized: Callable[..., LLM], plain: list[list[int]], rule: str
) -> None:
    """A seed decides in any batch and through preemption, whether positions without a draft are computed or not."""
    options = SETTINGS | LOOKUP | {"speculative_rule": rule}
    together = ids(make_llm(**options).generate(PROMPTS, PARAMS))
    assert [text for text, params in zip(together, PARAMS, strict=True) if params.temperature == 0] == [
        plain[0],
        plain[2],
    ]
    assert together != plain, "drawn texts have the target's law, and other noise"
    alone = make_llm(**options | {"max_num_seqs": 1})
    assert ids(alone.generate(PROMPTS, PARAMS)) == together
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}
    small = sized(make_llm, 22, **options, **graphs)
    assert ids(small.generate(PROMPTS, PARAMS)) == together
    assert small.get_metrics().num_preemptions > 0


def test_what_is_not_found_is_not_computed(make_llm: Callable[..., LLM]) -> None:
    """If the host knows the drafts, other positions are not computed. On graphs, rows are padded instead."""
    options = SETTINGS | LOOKUP | {"prompt_lookup_min": 60, "prompt_lookup_max": 60}
    llm = make_llm(**options)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    stats = llm.get_metrics()
    assert stats.num_draft_tokens == 0
    assert stats.acceptance.num_plain == stats.num_verify_rows > 20


def test_a_row_that_fails_is_looked_up_again(make_llm: Callable[..., LLM], plain: list[list[int]]) -> None:
    """All requests restart with their tokens, and so does the drafter's state."""
    llm = make_llm(**SETTINGS | LOOKUP)
    names = [llm.add_request(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    texts: dict[str, list[int]] = {}
    logits, calls = llm.engine.model.logits, 0

    def fails(hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise Chance
        return logits(hidden)

    llm.engine.model.logits = fails  # type: ignore[method-assign]
    while llm.has_unfinished_requests:
        try:
            texts |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        except Chance:
            continue
    assert [texts[name] for name in names] == plain
    assert llm.get_metrics().acceptance.kept[-1] > 0


def test_vllms_names_mean_the_same() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
    ours = EngineConfig.of(speculative_config=config)
    assert ours == EngineConfig.of(draft="ngram", num_speculative_tokens=3, prompt_lookup_max=5)
    assert ours.speculative.prompt_lookup == (5, 5)
    assert EngineConfig.of(draft="ngram").speculative.prompt_lookup == (2, 4)
    assert EngineConfig.of(speculative_config={"model": "head"}) == EngineConfig.of(draft="head")
    for method in ("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "nemotron_h_mtp"):
        assert EngineConfig.of(speculative_config={"method": method}) == EngineConfig.of(draft="mtp")
