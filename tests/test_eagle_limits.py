"""The bugs of speculative decoding that only a whole engine can meet, by their ids: limits, shapes and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import Why
from bateleur.runner import LLM, RequestOutput, SamplingParams

VOCAB = 4096
K = 3


class Texts:
    """What requests will say, known from a plain run."""

    def __init__(self, plain: LLM) -> None:
        self._plain = plain
        self._texts: dict[str, list[int]] = {}

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output."""
        name = f"{prompt} {params}"
        if name not in self._texts:
            (output,) = self._plain.generate([{"prompt_token_ids": prompt}], params)
            self._texts[name] = prompt + output.outputs[0].token_ids
        return self._texts[name]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def tokens_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randint(3, VOCAB - 1) for _ in range(length)]


def asked(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def drain(llm: LLM, *, each_step: Callable[[], None] = lambda: None) -> list[RequestOutput]:
    """Run everything to its end; outputs in the order in which they ended."""
    done = []
    while llm.has_unfinished_requests:
        done += [output for output in llm.step() if output.finished]
        each_step()
    return done


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> Texts:
    return Texts(make_llm(max_model_len=224, max_num_seqs=1))


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], random_head: Path) -> Callable[..., LLM]:
    """Engines with the untrained head, or with a drafter if one is named."""

    def build(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"num_speculative_tokens": K}
        if overrides.get("drafter") is None and overrides.get("num_speculative_tokens", K):
            settings["draft"] = random_head
        if overrides.get("enable_prefix_caching"):
            settings["mamba_block_size"] = 8
        if "cudagraph_mode" in overrides:
            settings |= {"cudagraph_backend": "recorded", "cudagraph_checks": "PARANOID"}
        return make_llm(**(settings | overrides))

    return build


PROMPTS = [tokens_of(1, 5), tokens_of(2, 21), tokens_of(3, 1), tokens_of(4, 16)]
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=12 + 5 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.8, 0.0))
]


@pytest.mark.parametrize("k", [1, 7])
def test_c4_nothing_is_drafted_or_stored_beyond_max_model_len(
    make: Callable[..., LLM], texts: Texts, k: int
) -> None:
    llm = make(num_speculative_tokens=k, max_model_len=40)
    for prompt in (tokens_of(61, 30), tokens_of(62, 21)):
        llm.add_request(
            {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)
        )
    table, verifier = llm.engine.table, llm.engine._verifier
    drafting = llm.engine._drafting
    assert drafting is not None
    kv = [*llm.engine.caches.kv, *drafting.drafter.kv]  # type: ignore[attr-defined]

    def compare() -> None:
        for request in llm.engine.scheduler.running:
            drafts = verifier._next_ids[request.row, 1:]
            places = int(table.num_tokens[request.row]) + torch.arange(k)
            assert torch.equal(drafts >= 0, places < 40)
        assert not any(cache[0].any() for pair in kv for cache in pair), "the null block was written"

    for output in drain(llm, each_step=compare):
        prompt = output.prompt_token_ids
        limit = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40 - len(prompt))
        assert ids([output]) == [texts.of(prompt, limit)]
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output.outputs[0].token_ids) == 40


@pytest.mark.parametrize("policy", ["fold", "slots"])
def test_c6_a_chunk_of_exactly_1_plus_k_tokens_is_no_decode(
    make: Callable[..., LLM], texts: Texts, policy: str
) -> None:
    """It has the shape of a row with K drafts, and none of its tokens may be rejected."""
    prompt, params = tokens_of(71, 3 * (1 + K)), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm = make(
        max_num_seqs=1,
        max_num_batched_tokens=1 + K,
        mamba_state_policy=policy,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=[1 + K],
    )
    assert ids(llm.generate(asked([prompt]), params)) == [texts.of(prompt, params)]
    by_why = llm.engine.graphs.decisions.by_why
    assert by_why[Why.STATE] == 3
    assert by_why[Why.DECODE] == llm.get_metrics().num_steps - 3
    (short,) = (texts.of(prompt[: 1 + K], params),)
    assert ids(llm.generate(asked([prompt[: 1 + K]]), params)) == [short]
    assert by_why[Why.STATE] == 4


def test_c7_capture_sizes_need_not_be_multiples_of_1_plus_k(make: Callable[..., LLM], texts: Texts) -> None:
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    llm = make(
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=[3, 5, 7, 14],
        max_num_batched_tokens=16,
    )
    assert ids(llm.generate(asked(PROMPTS), PARAMS)) == wanted
    uniform = [key for key in llm.engine.graphs.plan.keys if key.uniform_query_len == 1 + K]
    assert uniform
    assert all(key.num_tokens == key.num_reqs * (1 + K) for key in uniform)
    assert llm.engine.graphs.decisions.by_why[Why.DECODE] > 5


def test_c8_drafts_have_blocks_and_the_tightest_request_still_runs(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 12 blocks: everything a decode step and its drafts store has a block, and no request waits forever."""
    plan = make().engine.caches.plan
    llm = make(kv_cache_memory_bytes=plan.state_bytes + 13 * plan.kv_bytes // plan.num_blocks)
    scheduler, table = llm.engine.scheduler, llm.engine.table
    assert scheduler.pool is not None
    assert scheduler.pool.capacity == 12
    schedule = scheduler.schedule

    def checked() -> Any:
        step = schedule()
        if step is not None:
            n = step.num_decodes
            rows, lens = step.rows[:n], step.query_lens[:n]
            stored = np.minimum(table.num_computed[rows] + lens + K, 96)
            assert (table.num_blocks[rows] * 4 >= stored).all()
        return step

    monkeypatch.setattr(scheduler, "schedule", checked)
    prompt = tokens_of(81, 12)
    longest = 12 * 4 - len(prompt) - (K - 1) - K  # see the message of the refusal
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=longest)
    with pytest.raises(ValueError, match="needs 13 KV blocks; the cache has 12"):
        llm.generate(asked([prompt]), SamplingParams(temperature=0, max_tokens=longest + 1))
    wanted = texts.of(prompt, params)
    names = [llm.add_request({"prompt_token_ids": prompt}, params) for _ in range(3)]
    done: list[RequestOutput] = []
    for _ in range(200):
        done += [output for output in llm.step() if output.finished]
    assert ids(done) == [wanted] * len(names)
    assert llm.get_metrics().num_preemptions > 0


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_e4_draft_graphs_leave_the_outputs_of_the_target_alone(
    make: Callable[..., LLM], texts: Texts, mode: str
) -> None:
    """vLLM #53488: who reads hidden states after the proposal, such as for logprobs of a prompt, gets the target's."""
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    llm = make(cudagraph_mode=mode, cudagraph_capture_sizes=[4, 8, 16], max_num_batched_tokens=16)
    engine, kept = llm.engine, []
    run = engine.graphs.run

    def remember(staged: Any) -> tuple[Tensor, ...]:
        outputs = run(staged)
        kept[:] = [(each, each.clone()) for each in outputs]
        return outputs

    engine.graphs.run = remember  # type: ignore[method-assign]
    for prompt, params in zip(asked(PROMPTS), PARAMS, strict=True):
        llm.add_request(prompt, params)

    def compare() -> None:
        assert len(kept) == 4
        assert all(torch.equal(now, then) for now, then in kept)

    assert sorted(ids(drain(llm, each_step=compare))) == sorted(wanted)
    drafting = engine._drafting
    assert drafting is not None
    assert drafting.drafter.decisions.by_why[Why.DECODE] > 5  # type: ignore[attr-defined]
