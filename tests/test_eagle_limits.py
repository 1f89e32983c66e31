"""Known bugs of speculative decoding that need a whole engine, by their ids in the catalogue: limits, shapes and
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import DispatchReason
from bateleur.runner import LLM, RequestOutput, SamplingParams

VOCAB = 97
K = 3


class Texts:
    """The texts of requests, from plain runs."""

    def __init__(self, plain: LLM) -> None:
        self._plain = plain
        self._texts: dict[str, list[int]] = {}

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output tokens."""
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
    """Run until all requests have ended; returns outputs in the order in which they ended."""
    done = []
    while llm.has_unfinished_requests:
        done += [output for output in llm.step() if output.finished]
        each_step()
    return done


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> Texts:
    return Texts(make_llm(max_model_len=224, max_num_seqs=1))


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., LLM], random_head: Path) -> Callable[..., LLM]:
    """Engines with the untrained head, or with the given drafter."""

    def build(**overrides: Any) -> LLM:
        settings: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
        settings |= {"num_speculative_tokens": K}
        if overrides.get("drafter") is None and overrides.get("num_speculative_tokens", K):
            settings |= {"draft": random_head}
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
def test_c4_nothing_is_drafted_or_stored_beyond_max_model_len(make: Callable[..., LLM], texts: Texts, k: int) -> None:
    llm = make(num_speculative_tokens=k, max_model_len=40)
    for prompt in (tokens_of(61, 30), tokens_of(62, 21)):
        llm.add_request({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
    table, verifier = llm.engine.table, llm.engine.runner.rejection_sampler
    drafting = llm.engine.runner.proposer
    assert drafting is not None
    kv = [*llm.engine.caches.kv, *drafting.drafter.kv]  # type: ignore[attr-defined]

    def compare() -> None:
        llm.engine.runner.proposer.plan()  # type: ignore[union-attr]
        for request in llm.engine.scheduler.running:
            drafts = verifier.rows.next_ids[request.row, 1:]
            known, wanted = int(table.num_tokens[request.row]), int(table.num_drafts[request.row])
            assert wanted == min(k, 40 - 1 - known), "as many as a step may emit beside its last token"
            assert (drafts[:wanted] >= 0).all()
            assert not (drafts >= 0)[known + torch.arange(k) >= 40].any()
        assert not any(cache[0].any() for pair in kv for cache in pair), "the null block was written"

    for output in drain(llm, each_step=compare):
        prompt = output.prompt_token_ids
        limit = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40 - len(prompt))
        assert ids([output]) == [texts.of(prompt, limit)]
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output.outputs[0].token_ids) == 40


def watch(llm: LLM) -> list[int]:
    """Record the number of drafts of each proposal, eager or on a graph."""
    asked_for, proposer = [], llm.engine.runner.proposer
    assert proposer is not None
    drafter, graphs = proposer.drafter, proposer.graphs
    propose = drafter.propose

    def listens(context: Any) -> Tensor:
        asked_for.append(context.num_drafts)
        return propose(context)

    drafter.propose = listens  # type: ignore[method-assign]
    if graphs is not None:
        key_of = graphs.key_of

        def found(step: Any, num_drafts: int) -> Any:
            key = key_of(step, num_drafts)
            if key is not None:
                asked_for.append(num_drafts)
            return key

        graphs.key_of = found  # type: ignore[method-assign]
    return asked_for


GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16, 32]}


@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_nothing_is_drafted_for_a_request_that_ends(
    make: Callable[..., LLM], texts: Texts, graphs: dict[str, Any]
) -> None:
    llm = make(num_speculative_tokens=7, **graphs)
    asked_for = watch(llm)
    for count in (1, 2):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        assert ids(llm.generate(asked(PROMPTS[:1]), params)) == [texts.of(PROMPTS[0], params)]
    assert set(asked_for) == ({0} if graphs else set()), "a head on a CPU waits until drafts are wanted"
    assert llm.get_metrics().num_draft_tokens == 0
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert ids(llm.generate(asked(PROMPTS[:1]), params)) == [texts.of(PROMPTS[0], params)]
    assert max(asked_for) == 2


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_rows_near_their_end_stay_on_the_graph_of_the_others(make: Callable[..., LLM], texts: Texts, rule: str) -> None:
    """Rows are padded with positions without a draft. Tokens and counts equal those of eager steps."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 12, 16, 21)]
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, params, strict=True)]
    counted = []
    for graphs in ({}, GRAPHS):
        llm = make(speculative_rule=rule, **graphs)
        assert ids(llm.generate(asked(PROMPTS), params)) == wanted
        counts = llm.get_metrics().acceptance
        assert counts is not None
        counted.append((counts.num_steps, counts.num_plain, counts.num_drafts, counts.num_accepted))
    assert counted[0] == counted[1]
    decisions = llm.engine.runner.graphs.decisions
    assert decisions.by_reason[DispatchReason.DECODE] >= decisions.by_reason.total() - 2, "all but the prompts"


@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_where_a_heads_positions_end_nothing_is_drafted_nor_counted(
    make: Callable[..., LLM], make_head: Callable[..., Path], texts: Texts, graphs: dict[str, Any]
) -> None:
    """A draft pass at position 23, the last of 24, proposes the token of index 25, so 26 tokens are the most with
    drafts.
    """
    llm = make(draft=make_head(48, 97, 16, (1, 2, 3), 24), **graphs)
    assert llm.engine.runner.proposer is not None
    table, asked_for = llm.engine.table, watch(llm)
    assert llm.engine.runner.proposer.drafter.max_drafted_len == 26  # type: ignore[attr-defined]
    short, long = tokens_of(5, 16), tokens_of(6, 40)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.add_request({"prompt_token_ids": short}, params)

    def compare() -> None:
        llm.engine.runner.proposer.plan()  # type: ignore[union-attr]
        for request in llm.engine.scheduler.running:
            known, wanted = int(table.num_tokens[request.row]), int(table.num_drafts[request.row])
            assert wanted == min(K, max(0, 26 - known), len(short) + 30 - 1 - known)
            assert (llm.engine.runner.rejection_sampler.rows.next_ids[request.row, 1 : 1 + wanted] >= 0).all()

    (output,) = drain(llm, each_step=compare)
    assert ids([output]) == [texts.of(short, params)]
    assert 0 < sum(each > 0 for each in asked_for) <= 26 - len(short) - 1
    assert (0 in asked_for[-10:]) == bool(graphs), "a head on a CPU waits until drafts are wanted"
    before = llm.get_metrics().num_draft_tokens
    assert before > 0
    assert ids(llm.generate(asked([long]), params)) == [texts.of(long, params)]
    assert llm.get_metrics().num_draft_tokens == before
    assert ids(llm.generate(asked([short, long]), params)) == [texts.of(short, params), texts.of(long, params)]
    if graphs:
        decisions = llm.engine.runner.graphs.decisions
        assert decisions.by_reason[DispatchReason.QUERY_LEN] == 0


@pytest.mark.parametrize("policy", ["fold", "slots"])
def test_c6_a_chunk_of_exactly_1_plus_k_tokens_is_no_decode(
    make: Callable[..., LLM], texts: Texts, policy: str
) -> None:
    """The padded row looks like a row with K drafts, and none of its tokens may be rejected."""
    prompt, params = tokens_of(71, 3 * (1 + K)), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm = make(
        max_num_seqs=1,
        max_num_batched_tokens=1 + K,
        mamba_state_policy=policy,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=[1 + K],
    )
    assert ids(llm.generate(asked([prompt]), params)) == [texts.of(prompt, params)]
    by_reason = llm.engine.runner.graphs.decisions.by_reason
    assert by_reason[DispatchReason.HAS_PREFILL] == 3
    assert by_reason[DispatchReason.DECODE] == llm.get_metrics().num_steps - 3
    (short,) = (texts.of(prompt[: 1 + K], params),)
    assert ids(llm.generate(asked([prompt[: 1 + K]]), params)) == [short]
    assert by_reason[DispatchReason.HAS_PREFILL] == 4


def test_c7_capture_sizes_need_not_be_multiples_of_1_plus_k(make: Callable[..., LLM], texts: Texts) -> None:
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    llm = make(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[3, 5, 7, 14], max_num_batched_tokens=16)
    assert ids(llm.generate(asked(PROMPTS), PARAMS)) == wanted
    uniform = [key for key in llm.engine.runner.graphs.dispatcher.keys if key.uniform_query_len == 1 + K]
    assert uniform
    assert all(key.num_tokens == key.num_reqs * (1 + K) for key in uniform)
    assert llm.engine.runner.graphs.decisions.by_reason[DispatchReason.DECODE] > 5


def test_c8_drafts_have_blocks_and_the_tightest_request_still_runs(
    make: Callable[..., LLM], texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12 blocks: everything that a decode step and its drafts store has a block, and no request waits forever."""
    plan = make().engine.caches.plan
    room = plan.state_bytes + 13 * plan.kv_bytes // plan.num_blocks
    with pytest.raises(ValueError, match="set max_model_len to at most 48, or raise kv_cache_memory_bytes"):
        make(kv_cache_memory_bytes=room)
    llm = make(kv_cache_memory_bytes=room, max_model_len=48)
    scheduler, table = llm.engine.scheduler, llm.engine.table
    assert scheduler.pool is not None
    assert scheduler.pool.capacity == 12
    schedule = scheduler.schedule

    def checked(**given: Any) -> Any:
        step = schedule(**given)
        if step is not None:
            rows = step.rows[: step.num_decodes]
            stored = np.minimum(table.num_computed[rows] + K, 48)
            assert (table.num_blocks[rows] * 4 >= stored).all()
        return step

    monkeypatch.setattr(scheduler, "schedule", checked)
    prompt = tokens_of(81, 12)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12 * 4 - len(prompt))
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
    """vLLM #53488: hidden states that are read after the proposal, as for prompt logprobs, are the target's."""
    wanted = [texts.of(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    llm = make(cudagraph_mode=mode, cudagraph_capture_sizes=[4, 8, 16], max_num_batched_tokens=16)
    engine, kept = llm.engine, []
    run = engine.runner.graphs.run

    def remember(staged: Any) -> tuple[Tensor, ...]:
        outputs = run(staged)
        kept[:] = [(each, each.clone()) for each in outputs]
        return outputs

    engine.runner.graphs.run = remember  # type: ignore[method-assign]
    for prompt, params in zip(asked(PROMPTS), PARAMS, strict=True):
        llm.add_request(prompt, params)

    def compare() -> None:
        assert len(kept) == 4
        assert all(torch.equal(now, then) for now, then in kept)

    assert sorted(ids(drain(llm, each_step=compare))) == sorted(wanted)
    drafting = engine.runner.proposer
    assert drafting is not None
    assert drafting.drafter.decisions.by_reason[DispatchReason.DECODE] > 5  # type: ignore[attr-defined]
