"""Drafters and policies of a user's own: what they must be, and what they must answer, word for word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.eagle import TargetNeeds
from bateleur.runner import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
INT64 = torch.int64


class Answering:
    """A drafter that answers what it was told to; -1 at first."""

    num_speculative_tokens: Any = 2
    needs: Any = TargetNeeds()

    def __init__(self) -> None:
        self.answer: Callable[[int], Any] = lambda rows: torch.full((rows, 2), -1)

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Nothing is remembered."""

    def propose(self, context: Any) -> Any:
        return self.answer(len(context.rows))


class Deciding:
    """A policy that decides what it was told to."""

    def __init__(self) -> None:
        self.decision: Callable[[int], Any] = lambda rows: np.full(rows, 2, np.int32)

    def lengths(self, rows: Any) -> Any:
        return self.decision(len(rows))


@pytest.fixture(scope="module")
def shared(tiny: Callable[[str], Path]) -> tuple[LLM, Answering, Deciding]:
    drafter, policy = Answering(), Deciding()
    parts = {"drafter": drafter, "draft_policy": policy, "num_speculative_tokens": 2}
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    return LLM(tiny("llama"), device="cpu", **sizes, **parts), drafter, policy


@pytest.fixture
def engine(shared: tuple[LLM, Answering, Deciding], monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Answering, Deciding]:
    """Shared; what was told is forgotten behind each test."""
    llm, drafter, policy = shared
    monkeypatch.setattr(drafter, "answer", drafter.answer)
    monkeypatch.setattr(policy, "decision", policy.decision)
    return llm, drafter, policy


TENSOR = "it must be a tensor (1, 2) torch.int64 on cpu"
ANSWERS: list[tuple[Callable[[int], Any], str]] = [
    (lambda r: None, "a NoneType"),
    (lambda r: [[1, 2]] * r, "a list"),
    (lambda r: np.zeros((r, 2), np.int64), "a ndarray"),
    (lambda r: 5, "a int"),
    (lambda r: torch.zeros(r, 3, dtype=INT64), "(1, 3) torch.int64 on cpu"),
    (lambda r: torch.zeros(r, 1, dtype=INT64), "(1, 1) torch.int64 on cpu"),
    (lambda r: torch.zeros(r + 1, 2, dtype=INT64), "(2, 2) torch.int64 on cpu"),
    (lambda r: torch.zeros(r, dtype=INT64), "(1,) torch.int64 on cpu"),
    (lambda r: torch.zeros(r, 2, 1, dtype=INT64), "(1, 2, 1) torch.int64 on cpu"),
    (lambda r: torch.zeros(0, dtype=INT64), "(0,) torch.int64 on cpu"),
    (lambda r: torch.zeros(r, 2), "(1, 2) torch.float32 on cpu"),
    (lambda r: torch.zeros(r, 2, dtype=torch.int32), "(1, 2) torch.int32 on cpu"),
    (lambda r: torch.zeros(r, 2, dtype=torch.bool), "(1, 2) torch.bool on cpu"),
    (lambda r: torch.zeros(r, 2, dtype=INT64, device="meta"), "(1, 2) torch.int64 on meta"),
]


@pytest.mark.parametrize(("answer", "shown"), ANSWERS)
def test_answers(engine: Any, refused: Any, answer: Callable[[int], Any], shown: str) -> None:
    llm, drafter, _ = engine
    drafter.answer = answer
    with refused(f"drafter proposed {shown}; {TENSOR}"):
        llm.generate("abc", GREEDY)


@pytest.mark.parametrize("token", [-7, 101, 5000, 2**31, 2**62, -(2**63)])
def test_what_is_no_token_is_no_draft(engine: Any, token: int) -> None:
    llm, drafter, _ = engine
    (plain,) = llm.generate("abc", GREEDY)
    drafter.answer = lambda rows: torch.full((rows, 2), token)
    (output,) = llm.generate("abc", GREEDY)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


WHOLE = "it must be 1 integers in [0, 2]"
DECISIONS: list[tuple[Callable[[int], Any], str]] = [
    (lambda r: None, "None"),
    (lambda r: 1, "1"),
    (lambda r: ["a"] * r, "['a']"),
    (lambda r: np.full(r, -3, np.int32), "array([-3], dtype=int32)"),
    (lambda r: np.full(r, 9, np.int32), "array([9], dtype=int32)"),
    (lambda r: np.full(r, 1.5), "array([1.5])"),
    (lambda r: np.full(r, np.nan), "array([nan])"),
    (lambda r: np.zeros(r + 1, np.int32), "array([0, 0], dtype=int32)"),
    (lambda r: np.zeros((r, 1), np.int32), "array([[0]], dtype=int32)"),
    (lambda r: [10**30] * r, f"[{10**30}]"),
    (lambda r: np.full(r, True), "array([ True])"),
]


@pytest.mark.parametrize(("decision", "shown"), DECISIONS)
def test_decisions(engine: Any, refused: Any, decision: Callable[[int], Any], shown: str) -> None:
    llm, _, policy = engine
    policy.decision = decision
    with refused(f"draft_policy gave {shown}; {WHOLE}"):
        llm.generate("abc", GREEDY)


WHOLE_NUMBERS = [lambda r: [1] * r, lambda r: np.full(r, 2), lambda r: np.zeros(r, np.int8), lambda r: np.ones(r, "u1")]


@pytest.mark.parametrize("decision", WHOLE_NUMBERS)
@pytest.mark.parametrize("prompt", ["abc", list(range(2, 42))], ids=["short", "long"])
def test_integers_of_any_kind(engine: Any, prompt: Any, decision: Callable[[int], Any]) -> None:
    """In the first steps of a long prompt no request gets drafts. An empty list has no dtype of integers."""
    llm, _, policy = engine
    policy.decision = decision
    assert len(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) == 6


def test_an_error_of_theirs_is_theirs_and_the_engine_goes_on(engine: Any) -> None:
    llm, drafter, policy = engine
    (plain,) = llm.generate("abc", GREEDY)
    other = llm.add_request("abc", GREEDY)
    for part, name in ((drafter, "answer"), (policy, "decision")):
        told = getattr(part, name)
        setattr(part, name, lambda rows: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("xyz", GREEDY)
        setattr(part, name, told)
    reports = []
    while llm.has_unfinished_requests:
        reports += llm.step()
    assert [(r.request_id, r.outputs[0]) for r in reports] == [(other, plain.outputs[0])]


NEEDS = TargetNeeds((9,))
WRONG: list[tuple[str, Any, str]] = [
    *(
        (
            "num_speculative_tokens",
            value,
            f"drafter.num_speculative_tokens is {value!r}; it must be num_speculative_tokens = 2",
        )
        for value in ("2", 0, -1, None, 3, True, 2.0)
    ),
    *(
        ("needs", value, f"drafter.needs is {value!r}; it must be a bateleur.eagle.TargetNeeds")
        for value in (None, 5, (1,))
    ),
    ("needs", NEEDS, "drafter.needs.taps is (9,); it must be boundaries of a model of 5 layers, 0 to 5"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_drafters(tiny: Any, refused: Any, name: str, value: Any, message: str) -> None:
    drafter = Answering()
    setattr(drafter, name, value)
    with refused(message):
        LLM(tiny("llama"), device="cpu", max_model_len=64, drafter=drafter, num_speculative_tokens=2)


@pytest.mark.parametrize("name", ["admit", "propose"])
def test_methods_that_are_none(tiny: Any, name: str) -> None:
    drafter, rule = (Answering(), "it must be a bateleur.eagle.Drafter, which has admit, needs, num_speculative")
    setattr(drafter, name, 5)
    with pytest.raises(ValueError, match=rule):
        LLM(tiny("llama"), device="cpu", drafter=drafter, num_speculative_tokens=2)


def test_a_drafter_without_a_number_of_drafts(tiny: Any, refused: Any) -> None:
    with refused("drafter.num_speculative_tokens is 2; it must be num_speculative_tokens = 0"):
        LLM(tiny("llama"), device="cpu", max_model_len=64, drafter=Answering())


def test_two_that_propose(tiny: Any) -> None:
    with pytest.raises(ValueError, match="; it must be None with draft = 'auto': give one of them"):
        LLM(tiny("llama"), device="cpu", draft="auto", drafter=Answering(), num_speculative_tokens=2)
