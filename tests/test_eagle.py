"""A draft head and its target generate the tokens of plain decoding, for any head, cache mode and graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bateleur.cudagraph import DispatchReason
from bateleur.eagle import BySurvival, FixedDrafts, PolicyRows, StepCost, StepTime
from bateleur.eagle.passes import DraftPasses
from bateleur.metadata.native import unavailable_reason
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.model_runner.graph_dispatcher import GraphDispatcher
from eagle_doubles.drafters import NoDrafts

PROMPTS = ["def:fibonacci(n):", "import_os;def:walk(path):", "x", "class:Stack:def:__init__(self"]
PARAMS = [
    SamplingParams(temperature=t, seed=3 + i, max_tokens=17 + i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 0.0, 1.0))
]
# Everything that may change sampled tokens: penalties count drafts, stops cut accepted drafts, all logprobs.
HARD = SamplingParams(
    temperature=0.7,
    seed=5,
    top_p=0.9,
    frequency_penalty=0.6,
    repetition_penalty=1.2,
    min_tokens=4,
    max_tokens=24,
    logprobs=2,
    stop=["o;"],
)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    return partial(make_llm, model=tiny_hybrid)


@pytest.fixture(scope="module")
def random_head(tiny_head: Path) -> Path:
    return tiny_head


@pytest.fixture(scope="module")
def expected(make_llm: Callable[..., LLM]) -> dict[str, Any]:
    plain = make_llm(max_model_len=128, max_num_seqs=1)
    hard = plain.generate(PROMPTS, HARD)
    assert {output.outputs[0].finish_reason for output in hard} == {"stop", "length"}
    return {"mixed": ids(plain.generate(PROMPTS, PARAMS)), "hard": hard}


@pytest.mark.filterwarnings("ignore:.*batch sizes have no graph for rows:RuntimeWarning")  # few sizes on purpose
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mamba_state_policy": "slots", "max_num_batched_tokens": 12, "max_num_seqs": 3},
        {"enable_prefix_caching": True, "mamba_block_size": 8},
        {"enable_prefix_caching": True, "mamba_cache_mode": "align", "mamba_block_size": 16},
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_checks": "PARANOID"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "plain",
)
def test_the_tokens_are_those_of_plain_decoding(
    make_llm: Callable[..., LLM], expected: dict[str, Any], random_head: Path, settings: dict[str, Any], k: int
) -> None:
    graphs = {"cudagraph_backend": "recorded", "cudagraph_capture_sizes": [1 + k, 2 + 2 * k, 12]}
    llm = make_llm(
        max_model_len=128,
        draft=random_head,
        num_speculative_tokens=k,
        **(graphs if "cudagraph_mode" in settings else {}),
        **settings,
    )
    for _ in range(2 if "enable_prefix_caching" in settings else 1):
        assert ids(llm.generate(PROMPTS, PARAMS)) == expected["mixed"]
    for got, wanted in zip(llm.generate(PROMPTS, HARD), expected["hard"], strict=True):
        mine, theirs = got.outputs[0], wanted.outputs[0]
        assert (mine.token_ids, mine.text, mine.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        for entry, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert list(entry) == list(other)
            assert [e.logprob for e in entry.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-4)


class Switching:
    """Draft policy with K drafts, none, K, none: speculation pauses and resumes."""

    def __init__(self) -> None:
        self.steps = 0

    def lengths(self, rows: PolicyRows) -> Any:
        self.steps += 1
        return np.minimum(rows.max_drafts, 3 if self.steps // 4 % 2 else 0).astype(np.int32)


@pytest.mark.filterwarnings("ignore:.*batch sizes have no graph for rows:RuntimeWarning")  # few sizes on purpose
@pytest.mark.parametrize("graphs", ["NONE", "FULL_DECODE_ONLY"])
def test_f2_drafts_may_differ_by_request_and_step(
    make_llm: Callable[..., LLM], expected: dict[str, Any], random_head: Path, graphs: str
) -> None:
    policies: list[Any] = [Switching(), {1: 3, 2: 1, 4: 0}, BySurvival(StepCost([1, 64], [1.0, 2.0])), "auto"]
    for policy in policies:
        llm = make_llm(
            max_model_len=128,
            draft=random_head,
            num_speculative_tokens=3,
            draft_policy=policy,
            cudagraph_mode=graphs,
            cudagraph_backend="recorded",
            cudagraph_capture_sizes=[1, 2, 4, 8],
        )
        assert ids(llm.generate(PROMPTS, PARAMS)) == expected["mixed"]
        acceptance = llm.get_metrics().acceptance
        assert acceptance is not None
        assert acceptance.num_steps > 0 or policy == "auto"  # "auto" may not draft in such a short run
        assert acceptance.num_plain > 0 or isinstance(policy, BySurvival)


def test_metrics_tell_what_became_of_drafts(make_llm: Callable[..., LLM], random_head: Path) -> None:
    assert make_llm(max_model_len=128).get_metrics().acceptance_per_position == []
    llm = make_llm(max_model_len=128, draft=random_head, num_speculative_tokens=2)
    llm.generate(PROMPTS, PARAMS)
    stats = llm.get_metrics()
    first, second = stats.acceptance_per_position
    assert 0 <= first < 0.5
    assert second != second or second <= 1
    assert stats.tokens_per_step == stats.num_verified_tokens / stats.num_verify_rows
    assert stats.num_emitted_tokens == sum(p.max_tokens for p in PARAMS if p.max_tokens)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_other_rules_keep_greedy_tokens_and_are_reproducible(
    make_llm: Callable[..., LLM], expected: dict[str, Any], random_head: Path, rule: str
) -> None:
    llm = make_llm(
        max_model_len=128, draft=random_head, num_speculative_tokens=2, speculative_rule=rule, max_num_seqs=2
    )
    first = ids(llm.generate(PROMPTS, PARAMS))
    for i, params in enumerate(PARAMS):
        if params.temperature == 0:
            assert first[i] == expected["mixed"][i]
    if rule == "ratio":  # BLOCK's noise keys contain the step number
        assert ids(llm.generate(PROMPTS, PARAMS)) == first


def test_a1_rules_have_the_target_s_law(make_llm: Callable[..., LLM], random_head: Path) -> None:
    """The second token of many seeds after one prompt: sampled plainly, and with a verified draft."""
    prompts = [{"prompt_token_ids": [17, 30, 5]}] * 600
    params = [
        SamplingParams(temperature=0.6, top_k=4, seed=seed, max_tokens=2, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    settings: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    counts: dict[str, Counter[tuple[int, ...]]] = {}
    for rule in ("plain", "ratio", "block"):
        drafts: dict[str, Any] = {}
        if rule != "plain":
            drafts = {"draft": random_head, "num_speculative_tokens": 1, "speculative_rule": rule}
        llm = make_llm(**settings, **drafts)
        counts[rule] = Counter(tuple(each) for each in ids(llm.generate(prompts, params)))
    for rule in ("ratio", "block"):
        both = {pair for pair in counts["plain"] | counts[rule] if counts["plain"][pair] + counts[rule][pair] > 15}
        assert len(both) > 4
        worst = max(
            abs(counts["plain"][pair] - counts[rule][pair]) / (counts["plain"][pair] + counts[rule][pair]) ** 0.5
            for pair in both
        )
        assert worst < 4.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_rule": "typical"}, "speculative_rule is 'typical'; it must be one of coupled, ratio"),
        ({"draft": "auto", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; with a draft"),
        ({"draft": "nowhere"}, "holds no config.json"),
        ({"draft": "auto", "drafter": NoDrafts(4)}, "it must be None with draft = 'auto'"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3; it must be 0 without a draft or a drafter"),
        ({"draft": "auto", "num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5; it must be an integer"),
        ({"draft": "auto", "num_speculative_tokens": "4"}, "num_speculative_tokens is '4'; it must be an integer"),
        (
            {"draft": "auto", "num_speculative_tokens": 63, "max_model_len": 64},
            "num_speculative_tokens is 63; it must be at least 0, and below max_model_len - 1 = 63",
        ),
        ({"drafter": object()}, "drafter is .*; it must be a bateleur.eagle.Drafter"),
        ({"draft": "auto", "draft_policy": "sometimes"}, "draft_policy is 'sometimes'; it must be fixed, auto"),
        ({"draft": "auto", "draft_policy": 5}, "draft_policy is 5; it must be fixed, auto"),
        (
            {"draft": "auto", "draft_policy": {1: 9}},
            "draft_policy is {1: 9}; it must be at most num_speculative_tokens = 4",
        ),
        ({"draft": ""}, "draft is ''; it must be the path of a folder"),
        ({"seed": "x"}, "seed is 'x'; it must be an integer"),
        ({"block_size": 1.5}, "block_size is 1.5; it must be an integer"),
        ({"enable_prefix_caching": True, "mamba_block_size": 0}, "^mamba_block_size is 0; it must be an integer >= 1"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    make_llm: Callable[..., LLM], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(model=None, **settings)


@pytest.mark.filterwarnings("ignore:.*batch sizes have no graph for rows:RuntimeWarning")  # few sizes on purpose
@pytest.mark.parametrize(
    ("policy", "lens"),
    [("fixed", {1, 5}), ({1: 4, 2: 1, 4: 0}, {1, 2, 5}), ("auto", {1, 5}), (FixedDrafts(2), {1, 3, 5})],
)
def test_every_length_of_a_policy_has_graphs(
    make_llm: Callable[..., LLM], random_head: Path, policy: Any, lens: set[int]
) -> None:
    llm = make_llm(
        draft=random_head,
        draft_policy=policy,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_backend="recorded",
        cudagraph_capture_sizes=[2, 4, 6, 10],
    )
    assert {key.uniform_query_len for key in llm.engine.runner.graphs.dispatcher.keys} == lens
    drafter = llm.engine.runner.proposer.drafter
    assert {key.num_tokens for key in drafter.decode.dispatcher.keys} == {2, 4, 6}  # rows: 2, 4, 6, and 10 / 5


def test_a_draft_without_graphs_is_warned_about(
    make_llm: Callable[..., LLM], random_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: DraftPasses, execution: Any) -> Any:
        if execution.key is not None:
            raise RuntimeError("not today")
        return chain(self, execution)

    chain = DraftPasses.chain
    monkeypatch.setattr(DraftPasses, "chain", fails)
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}
    with pytest.warns(RuntimeWarning, match="no graph of the draft for .*not today"):
        make_llm(draft=random_head, cudagraph_capture_sizes=[2], **graphs)


def test_a_target_without_graphs_leaves_its_draft_eager(
    make_llm: Callable[..., LLM], expected: dict[str, Any], random_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no graph of the target could be captured, the drafter has no captured states and must run eagerly without an
    error.
    """

    def fails(self: GraphDispatcher, execution: Any) -> Any:
        if execution.key is not None:
            raise RuntimeError("not today")
        return body(self, execution)

    body = GraphDispatcher._body
    monkeypatch.setattr(GraphDispatcher, "_body", fails)
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}
    with pytest.warns(RuntimeWarning, match="no graph for .*not today"):
        llm = make_llm(max_model_len=128, draft=random_head, cudagraph_capture_sizes=[4], **graphs)
    assert ids(llm.generate(PROMPTS, PARAMS)) == expected["mixed"]
    drafter = llm.engine.runner.proposer.drafter
    assert drafter.prefill is None
    assert not drafter.decode.ready
    whys = set(drafter.decisions.by_reason)
    # The C implementation of the draft passes uses no graph.
    assert whys == ({DispatchReason.NOT_CAPTURED} if unavailable_reason() is not None else set())


def test_any_policy_that_asks_hears_what_steps_took(make_llm: Callable[..., LLM], random_head: Path) -> None:
    heard: list[StepTime] = []

    class Listening:
        def lengths(self, rows: PolicyRows) -> Any:
            return np.minimum(len(heard) % 3, rows.max_drafts).astype(np.int32)

        def observe(self, step: StepTime) -> None:
            heard.append(step)

    settings: dict[str, Any] = {"num_speculative_tokens": 3}
    llm = make_llm(max_model_len=128, draft=random_head, draft_policy=Listening(), **settings)
    llm.generate(PROMPTS, PARAMS)
    stats = deepcopy(llm.get_metrics())
    assert len(heard) == stats.num_steps - 1, "of a step before the next one is planned"
    llm.generate(PROMPTS[:1], PARAMS[0])
    del heard[stats.num_steps :]
    assert all(0 < step.seconds < 60 for step in heard)
    assert sum(step.num_rows for step in heard) == stats.num_verify_rows
    assert sum(step.num_tokens for step in heard) == stats.num_verified_tokens
    assert sum(step.num_drafts for step in heard) >= stats.acceptance.num_drafts > 0
    assert sum(step.num_other_tokens for step in heard) == stats.num_prefill_tokens


def test_a_prompt_that_goes_on_gets_no_drafts(make_llm: Callable[..., LLM], random_head: Path) -> None:
    """Rows with a chunk of their prompt are not passed to the policy; steps with only such rows have no drafts."""
    asked: list[int] = []

    class Listening:
        def lengths(self, rows: PolicyRows) -> Any:
            asked.append(len(rows))
            return FixedDrafts(3).lengths(rows)

    wanted: list[int] = []
    llm = make_llm(draft=random_head, num_speculative_tokens=3, draft_policy=Listening(), max_num_batched_tokens=32)
    drafter = llm.engine.runner.proposer.drafter
    propose = drafter.propose

    def listens(context: Any) -> Any:
        wanted.append(context.num_drafts)
        return propose(context)

    drafter.propose = listens
    llm.generate({"prompt_token_ids": [5] * 80}, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert asked[:3] == [0, 0, 1]
    assert wanted[:3] == [0, 0, 3], "the head stores keys of the first parts of the prompt, and makes no drafts"
