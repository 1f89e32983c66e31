"""Async scheduling: each step is prepared while the previous one runs. Tokens must equal those of synchronous
scheduling.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, CompletionOutput, RequestOutput, SamplingParams
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.step_in_flight import StepInFlight
from scripted import Partly, Script

Make = Callable[..., LLM]
"""Makes an engine with `async_scheduling` on or off, and other options."""

SIZES = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4}
PREFIXES = {"enable_prefix_caching": True, "mamba_block_size": 8}


@pytest.fixture(scope="module")
def make(tiny_hybrid: Path, tiny_head: Path, tiny_mtp: Path) -> Make:
    def made(ahead: bool, **settings: Any) -> LLM:
        model = tiny_mtp if settings.get("draft") == "mtp" else tiny_hybrid
        if settings.get("draft") == "head":
            settings["draft"] = tiny_head
        return LLM(model, async_scheduling=ahead, **(SIZES | settings))

    return made


def requests(
    count: int, seed: int, lengths: Sequence[int] = (1, 2, 5, 14, 30)
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with shared prefixes, and sampling parameters of all kinds."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 97) for _ in range(30)] for _ in range(2)]
    made = []
    for i in range(count):
        prompt = rng.choice(stems)[: rng.randrange(1, 30)] + [rng.randrange(1, 97) for _ in range(rng.randrange(1, 9))]
        params: dict[str, Any] = {"max_tokens": rng.choice(lengths), "seed": i}
        params |= rng.choice([{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}])
        params |= rng.choice(
            [
                {},
                {"ignore_eos": True},
                {"stop_token_ids": list(range(1, 20)), "min_tokens": min(3, params["max_tokens"])},
                {"repetition_penalty": 1.3, "presence_penalty": 0.5},
                {"logprobs": 2, "prompt_logprobs": 1},
                {"n": 3, "temperature": 0.7},
                {"stop": ["a", "!", "B"]},
                {"bad_words": ["a", "bc"], "logit_bias": {5: 2.0}},
                {"structured_outputs": {"regex": "[a-f]{2}[!-O]{0,9}[P-~]*"}},
                {"structured_outputs": {"regex": "([!-O]|[P-~]){2,30}"}, "ignore_eos": True},
            ]
        )
        made.append((prompt, SamplingParams(**params)))
    return made


def told(output: RequestOutput) -> list[Any]:
    """Everything in an output that does not depend on scheduling. Log probabilities are rounded, because the batch size
    affects their last bits.
    """
    prompt = output.prompt_logprobs
    return [
        [list(map(sorted, prompt[1:])) if prompt else None],
        *[(each.token_ids, each.text, each.finish_reason, each.stop_reason, scored(each)) for each in output.outputs],
    ]


def scored(output: CompletionOutput) -> list[Any]:
    values = [] if output.cumulative_logprob is None else [round(output.cumulative_logprob, 2)]
    return [*values, *map(sorted, output.logprobs or ())]


def serve(
    llm: LLM,
    asked: list[tuple[list[int], SamplingParams]],
    seed: int,
    aborts: float = 0.0,
    script: Script | None = None,
) -> dict[int, Any]:
    """Run requests that arrive over time and abort some. Returns the outputs of the others by number.

    script: learns the texts.
    """
    rng, names, ended = random.Random(seed), {}, {}
    waiting = list(enumerate(asked))
    while waiting or llm.has_unfinished_requests:
        for _ in range(rng.choice([0, 1, 2])):
            if waiting:
                number, (prompt, params) = waiting.pop(0)
                names[llm.add_request({"prompt_token_ids": prompt}, params, stream=number % 2 == 0)] = number
        if names and rng.random() < aborts:
            name = rng.choice(sorted(names))
            llm.abort(name)
            names.pop(name)
        for output in llm.step():
            if output.finished and output.request_id in names:
                ended[names.pop(output.request_id)] = told(output)
                if script is not None:
                    script.texts += [[*output.prompt_token_ids, *each.token_ids] for each in output.outputs]
    return ended


CASES = {
    "plain": {},
    "slots": {"mamba_state_policy": "slots"},
    "fold": {"mamba_state_policy": "fold"},
    "prefixes": PREFIXES,
    "prefixes-slots": PREFIXES | {"mamba_state_policy": "slots"},
    "align": PREFIXES | {"mamba_cache_mode": "align"},
    "graphs": {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_backend": "recorded",
        "cudagraph_capture_sizes": [4, 8, 16],
        "cudagraph_checks": "PARANOID",
    },
}


HEAD = {"draft": "head", "num_speculative_tokens": 3}
DRAFTS = {
    "head": HEAD,
    "head-graphs": HEAD | CASES["graphs"] | {"cudagraph_checks": "CHEAP"},
    "head-prefixes": HEAD | PREFIXES,
    "mtp": {"draft": "mtp", "num_speculative_tokens": 2} | PREFIXES,
    "ngram": {"draft": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "partly": {"num_speculative_tokens": 3},
    "partly-slots": {"num_speculative_tokens": 3, "mamba_state_policy": "slots"},
    "partly-prefixes": {"num_speculative_tokens": 4} | PREFIXES,
    "partly-prefixes-slots": {"num_speculative_tokens": 4, "mamba_state_policy": "slots"} | PREFIXES,
    "partly-align": {"num_speculative_tokens": 3, "mamba_cache_mode": "align"} | PREFIXES,
    "partly-graphs": {"num_speculative_tokens": 3} | CASES["graphs"],
}


@pytest.mark.parametrize("case", DRAFTS)
def test_tokens_are_the_same_with_drafts(make: Make, check_integrity: Callable[[Engine], None], case: str) -> None:
    settings, asked, script = DRAFTS[case], requests(14, seed=1), Script()
    plain = {name: value for name, value in settings.items() if name not in ("draft", "num_speculative_tokens")}
    plain.pop("prompt_lookup_min", None)
    if case == "mtp":
        plain |= settings | {"draft_policy": {1: 0}}
    expected = serve(make(False, **plain), asked, seed=2, script=script)
    if case.startswith("partly"):
        settings = settings | {"drafter": Partly(script, settings["num_speculative_tokens"], 97)}
    llm = make(True, **settings)
    for seed, aborts in ((2, 0.0), (3, 0.2)):
        found = serve(llm, asked, seed, aborts)
        assert found == {number: expected[number] for number in found}
        check_integrity(llm.engine)
    stats = llm.get_metrics()
    assert stats.acceptance is not None
    assert stats.acceptance.num_drafts > 100
    assert stats.acceptance.num_accepted > (50 if case.startswith("partly") else 0)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_tokens_are_the_same(make: Make, check_integrity: Callable[[Engine], None], settings: dict[str, Any]) -> None:
    asked = requests(14, seed=1)
    expected = serve(make(False, **settings), asked, seed=2)
    llm = make(True, **settings)
    assert serve(llm, asked, seed=2) == expected
    assert not llm.engine.registry.in_flight
    assert llm.get_metrics().async_scheduling
    check_integrity(llm.engine)
    several = serve(llm, asked, seed=3, aborts=0.3)
    assert several == {number: expected[number] for number in several}
    assert len(several) < len(asked)
    check_integrity(llm.engine)


@pytest.mark.parametrize("policy", ["slots", "fold"])
@pytest.mark.parametrize("block", [4, 8])
def test_no_more_state_pages_are_held_than_were_planned(
    make: Make, sized: Callable[..., LLM], check_integrity: Callable[[Engine], None], policy: str, block: int
) -> None:
    """A row holds up to three state pages: read and written by the step in flight, and written by the next step."""
    sharing = PREFIXES | {"mamba_block_size": block, "mamba_state_policy": policy}
    asked = requests(10, seed=7)
    expected = serve(make(False, **sharing), asked, seed=8)
    llm = sized(lambda **all: make(True, **all), 1 + 64, **sharing)
    assert serve(llm, asked, seed=8) == expected
    check_integrity(llm.engine)


@pytest.mark.parametrize("settings", [{}, PREFIXES], ids=["plain", "prefixes"])
def test_tokens_are_the_same_where_requests_are_preempted_in_flight(
    make: Make, sized: Callable[..., LLM], check_integrity: Callable[[Engine], None], settings: dict[str, Any]
) -> None:
    asked = requests(9, seed=4, lengths=(15, 30))
    expected = serve(make(False, **settings), asked, seed=5)
    llm = sized(lambda **all: make(True, **all), 1 + 68 // 4, **settings)
    assert serve(llm, asked, seed=6, aborts=0.1).items() <= expected.items()
    assert serve(llm, asked, seed=5) == expected
    assert llm.get_metrics().num_preemptions > 3
    check_integrity(llm.engine)


def test_places_without_a_draft_end_no_request_before_its_length(make: Make) -> None:
    """Rows are padded to the query length of a graph. Upper bounds of lengths count the padding, and may exceed
    max_model_len.
    """
    how = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.9, seed=3)
    asked, script = [([7 + i] * (34 + i), how) for i in range(8)], Script()
    expected = serve(make(False), asked, seed=2, script=script)
    graphs = CASES["graphs"] | {"cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = make(True, num_speculative_tokens=4, drafter=Partly(script, 4, 97), **graphs)
    for seed in range(3):
        assert serve(llm, asked, seed) == expected


def test_vllm_53919_accepted_counts_travel_with_their_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move in the batch between steps that accept different numbers of drafts. Only the device knows their lengths
    at first.
    """
    asked, script = requests(14, seed=1), Script()
    serve(make(False), asked, seed=2, script=script)
    engine = (llm := make(True, num_speculative_tokens=3, drafter=Partly(script, 3, 97))).engine
    launch, collect, reached, moved = engine._launch, engine._collect, {}, 0

    def launched(marks: Any) -> StepInFlight | None:
        flight = launch(marks)
        assert engine.runner.lengths is not None
        if flight is not None:
            reached[id(flight)] = engine.runner.lengths._computed_M.numpy()[flight.batch.rows]
        return flight

    def collected(marks: Any) -> None:
        nonlocal moved
        flight, *later = engine.registry.in_flight
        plan, before = flight.batch, engine.table.num_committed.copy()
        collect(marks)
        accepted = {}
        for request, row, expected in zip(plan.requests, plan.rows, reached[id(flight)], strict=True):
            if request.row == row and request.finish_reason is None:
                assert engine.table.num_committed[row] == expected
                accepted[int(row)] = int(expected - before[row])
        for place, row in enumerate(later[0].batch.rows.tolist() if later else ()):
            there = int(plan.rows[place]) if place < len(plan.rows) else row
            moved += row in accepted and there in accepted and accepted[row] != accepted[there]

    monkeypatch.setattr(engine, "_launch", launched)
    monkeypatch.setattr(engine, "_collect", collected)
    serve(llm, asked, seed=3, aborts=0.1)
    assert moved > 3


@pytest.mark.parametrize("blocks", [1 + 64, 1 + 76 // 4], ids=["roomy", "preempting"])
def test_drafts_up_to_max_model_len_and_steps_that_fail_in_flight(
    make: Make,
    sized: Callable[..., LLM],
    check_integrity: Callable[[Engine], None],
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
) -> None:
    """No step computes positions beyond max_model_len, although bounds exceed it. A failed step in flight is computed
    again.
    """
    asked, script = requests(10, seed=9, lengths=(22,)), Script()
    asked += [(prompt[:20], SamplingParams(max_tokens=None, ignore_eos=True, seed=3)) for prompt, _ in asked[:3]]
    expected = serve(make(False), asked, seed=10, script=script)
    assert sum(len(text) == SIZES["max_model_len"] for text in script.texts) == 3
    drafting = {"num_speculative_tokens": 4, "drafter": Partly(script, 4, 97), "mamba_state_policy": "slots"}
    llm = sized(lambda **all: make(True, **all), blocks, **drafting, **PREFIXES)
    assert serve(llm, asked, seed=10) == expected
    assert (llm.get_metrics().num_preemptions > 0) == (blocks < 64)
    check_integrity(llm.engine)
    names, calls = ([llm.add_request({"prompt_token_ids": each}, how) for each, how in asked], iter(range(1000)))
    logits, ended = llm.engine.model.logits, {}

    def fails_sometimes(hidden: Any) -> Any:
        if next(calls) % 7 == 6:
            raise RuntimeError("out of memory")
        return logits(hidden)

    monkeypatch.setattr(llm.engine.model, "logits", fails_sometimes)
    while llm.has_unfinished_requests:
        try:
            ended |= {output.request_id: told(output) for output in llm.step()}
        except RuntimeError:
            check_integrity(llm.engine)
    assert [ended[name] for name in names] == [expected[number] for number in range(len(asked))]
    check_integrity(llm.engine)
