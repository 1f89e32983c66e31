"""Prompt logprobs equal those of transformers, however a prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.engine import engine
from bateleur.runner.sampling import logprobs
from eagle_doubles.drafters import RandomDrafter
from scripted import RECURRENCES

V = 97
LENGTHS = (23, 1, 2, 40, 17, 9)
ASKED = (3, 0, 5, 2, None, 0)
"""Number of most likely tokens requested for each prompt."""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=asked, logprobs=i % 2 or None)
    for i, asked in enumerate(ASKED)
]
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "drafts": {"num_speculative_tokens": 2, "max_num_batched_tokens": 11, "max_num_seqs": 3},
    "graphs": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        "cudagraph_checks": "PARANOID",
    },
}


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    family, overrides = RECURRENCES["mamba2"]
    return tiny(family, **overrides)


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], folder: Path) -> Callable[..., LLM]:
    def made(**settings: Any) -> LLM:
        if k := settings.get("num_speculative_tokens"):
            settings["drafter"] = RandomDrafter(k, V)
        return make_llm(**{"model": folder, "max_model_len": 64, "block_size": 4} | settings)

    return made


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    random = Random(0)
    return [{"prompt_token_ids": [random.randrange(3, V) for _ in range(length)]} for length in LENGTHS]


@pytest.fixture(scope="module")
def laws(folder: Path, prompts: list[Any]) -> list[torch.Tensor]:
    """(length, V) float64 log probabilities of the next token at each position, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([each["prompt_token_ids"]])).logits[0].double().log_softmax(-1) for each in prompts]


def check(outputs: Sequence[RequestOutput], laws: Sequence[torch.Tensor]) -> None:
    for output, asked, law in zip(outputs, ASKED, laws, strict=True):
        ids, told = output.prompt_token_ids, output.prompt_logprobs
        if asked is None:
            assert told is None
            continue
        assert told is not None
        assert len(told) == len(ids)
        assert told[0] is None
        for at in range(1, len(ids)):
            entry, row = told[at], law[at - 1]
            assert entry is not None
            best = row.topk(asked).indices.tolist()
            assert list(entry) == list(dict.fromkeys([ids[at], *best]))
            for token, each in entry.items():
                assert each.logprob == pytest.approx(float(row[token]), abs=2e-5)
                assert each.rank == int((row > row[token]).sum()) + 1


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM], prompts: list[Any]) -> list[list[int]]:
    """Outputs for the prompts without logprobs."""
    free = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    return [output.outputs[0].token_ids for output in make().generate(prompts, free)]


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_transformers(
    make: Callable[..., LLM],
    prompts: list[Any],
    laws: list[torch.Tensor],
    plain: list[list[int]],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of five tokens, together with decoding rows."""
    monkeypatch.setattr(logprobs, "_LOGITS_AT_ONCE", 5 * V)
    llm, slices = make(**CASES[case]), []
    logits = llm.engine.model.logits
    monkeypatch.setattr(
        llm.engine.model,
        "logits",
        lambda hidden: slices.append(len(hidden)) or logits(hidden),  # type: ignore[func-returns-value]
    )
    outputs = llm.generate(prompts, PARAMS)
    check(outputs, laws)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    wanted = sum(length - 1 for length, asked in zip(LENGTHS, ASKED, strict=True) if asked is not None)
    num_drawn = sum(slices) - wanted
    assert num_drawn >= sum(map(len, plain)), "of nobody's prompt else"
    before = len(slices)
    llm.generate([prompts[4]], PARAMS[4])
    counts = {"drafts": range(1, 13), "graphs": range(1, 3)}  # graphs compute logits within
    assert len(slices) - before in counts.get(case, (12,)), "who doesn't ask pays nothing"


def test_a_prompt_that_was_preempted_is_told_once(
    make: Callable[..., LLM],
    sized: Callable[..., LLM],
    prompts: list[Any],
    laws: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the step failed."""
    llm = sized(make, 17, max_num_batched_tokens=9, max_num_seqs=5)
    scored: list[int] = []
    score = engine.score_prompts

    def listen(*args: Any) -> Any:
        found = score(*args)
        scored.append(0 if found is None else len(found.token_ids))
        return found

    monkeypatch.setattr(engine, "score_prompts", listen)
    for prompt, params in zip(prompts, PARAMS, strict=True):
        llm.add_request(prompt, params)
    outputs: list[RequestOutput] = []
    broken = 0
    for number in range(200):
        if not llm.has_unfinished_requests:
            break
        halfway = any(each.lacks_prompt_logprobs for each in llm.engine.scheduler.running)
        if halfway and number % 3 == 2 and broken < 2:
            llm.engine.registry.consistent = False
            broken += 1
        outputs += llm.step()
    outputs.sort(key=lambda output: int(output.request_id.removeprefix("request-")))
    check(outputs, laws)
    assert sum(output.num_preemptions for output in outputs) > 2
    wanted = sum(length - 1 for length, asked in zip(LENGTHS, ASKED, strict=True) if asked is not None)
    assert sum(scored) == wanted
    assert broken == 2


def test_a_prefix_is_computed_and_published(
    make: Callable[..., LLM], prompts: list[Any], laws: list[torch.Tensor]
) -> None:
    llm = make(enable_prefix_caching=True, mamba_block_size=8)
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS)
        check(outputs, laws)
        for output, asked in zip(outputs, ASKED, strict=True):
            assert asked is None or output.num_cached_tokens == 0
    assert outputs[0].cache_miss == "prompt_logprobs compute every token of the prompt"
    (output,) = llm.generate([prompts[0]], PARAMS[4])
    assert output.num_cached_tokens == 16, "of what the others computed"
    assert output.prompt_logprobs is None


def test_reports_of_a_stream_have_them(make: Callable[..., LLM], prompts: list[Any]) -> None:
    llm = make(max_num_batched_tokens=8)
    for output in llm.stream([prompts[0]], PARAMS[0]):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == LENGTHS[0]
    name = llm.add_request(prompts[3], PARAMS[3])
    llm.step()
    told = llm.abort(name).prompt_logprobs
    assert told is not None
    assert len(told) == 9, "as far as it was computed"
