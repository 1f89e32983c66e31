"""Calls from inside the loop over a stream: each ends, and everybody gets what is theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tiny: Callable[[str], Path]) -> LLM:
    return LLM(tiny("llama"), device="cpu", max_model_len=64, max_num_seqs=4)


@pytest.fixture
def llm(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine that refuses to step for ever."""
    step, left = shared.engine.step, iter(range(300))

    def limited() -> None:
        assert next(left, None) is not None, "it steps for ever"
        step()

    monkeypatch.setattr(shared.engine, "step", limited)
    return shared


def tokens(llm: LLM, prompt: Any) -> list[int]:
    return llm.generate(prompt, PARAMS)[0].outputs[0].token_ids


def test_abort(llm: LLM) -> None:
    seen = []
    for output in llm.stream(["one", "two"], PARAMS):
        seen.append((output.request_id, llm.abort(output.request_id).outputs[0].finish_reason))
    assert len(dict(seen)) == 2
    assert {reason for _, reason in seen} == {"abort"}
    assert not llm.has_unfinished_requests


def test_generate(llm: LLM) -> None:
    one, two = tokens(llm, "one"), tokens(llm, "two")
    last = {}
    for output in llm.stream(["one", "one"], PARAMS):
        assert tokens(llm, "two") == two
        last[output.request_id] = output.outputs[0].token_ids
    assert list(last.values()) == [one, one]
    assert not llm.has_unfinished_requests


def test_another_stream(llm: LLM) -> None:
    one, two = tokens(llm, "one"), tokens(llm, "two")
    for _ in llm.stream("one", PARAMS):
        *_, inner = llm.stream("two", PARAMS)
        assert inner.outputs[0].token_ids == two
    outer, inner = llm.stream("one", PARAMS), llm.stream("two", PARAMS)
    assert [o.outputs[0].token_ids for o in inner][-1] == two
    assert [o.outputs[0].token_ids for o in outer][-1] == one


def test_step(llm: LLM) -> None:
    """`step` drives the stream's request along, and reports those of others alone."""
    one, two = tokens(llm, "one"), tokens(llm, "two")
    other, reports = llm.add_request("two", PARAMS), []
    outputs = []
    for output in llm.stream("one", PARAMS):
        outputs.append(output)
        reports += llm.step()
    assert outputs[-1].outputs[0].token_ids == one
    assert [(each.request_id, each.outputs[0].token_ids) for each in reports] == [(other, two)]
    for output in llm.stream("one", PARAMS):
        outputs.append(output)
        while llm.has_unfinished_requests:
            assert llm.step() == []
    assert outputs[-1].outputs[0].token_ids == one


def test_closing_early_keeps_what_others_report(llm: LLM) -> None:
    """Both end in the step whose first report closes the stream."""
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    other = llm.add_request("two", short)
    for _ in llm.stream(["one", "one"], short):
        break
    assert [output.request_id for output in llm.step()] == [other]
    assert not llm.has_unfinished_requests


def test_an_id_of_ones_own_choice_stands_in_nobodys_way(llm: LLM) -> None:
    number = int(llm.add_request("x", PARAMS).removeprefix("request-"))
    taken = [llm.add_request("x", PARAMS, request_id=f"request-{number + i}") for i in range(1, 20)]
    names = [output.request_id for output in llm.generate(["one", "two"], PARAMS)]
    assert len(set(names) - set(taken)) == 2
    while llm.has_unfinished_requests:
        llm.step()
    assert not llm.has_unfinished_requests


def test_a_stream_that_nobody_began_claims_nothing(llm: LLM, refused: Any) -> None:
    outputs = llm.stream("one", PARAMS)
    assert not llm.has_unfinished_requests
    assert len(list(outputs)) == 12
    later = llm.stream("one", PARAMS)
    (name,) = {request.request_id for request in later.gi_frame.f_locals["outputs"].gi_frame.f_locals["requests"]}
    llm.add_request("two", PARAMS, request_id=name)
    with refused(f"request_id is '{name}'; a request of that id is already waiting or running"):
        next(later)
    assert llm.abort(name).prompt == "two"
