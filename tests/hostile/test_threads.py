"""One caller at a time: another thread, a forked process or a callback is told so at once."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from eagle_doubles.drafters import StickyDrafter
from in_fork import raised_in_fork

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
BUSY = (
    "another thread is inside this LLM, which serves one at a time: give all requests to one thread, or hold a lock "
    "around every call"
)

CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("two", PARAMS),
    "stream": lambda llm: llm.stream("two", PARAMS),
    "add_request": lambda llm: llm.add_request("two", PARAMS),
    "abort": lambda llm: llm.abort("request-1"),
    "step": lambda llm: llm.step(),
}


class Gate(StickyDrafter):
    """A drafter that lets a test in where it is asked to propose: in the middle of a step."""

    def __init__(self) -> None:
        super().__init__(1)
        self.enter: Callable[[], None] | None = None

    def propose(self, context: Any) -> torch.Tensor:
        if self.enter is not None:
            self.enter()
        return super().propose(context)


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path], gate: Gate) -> LLM:
    return LLM(tiny("llama"), device="cpu", max_model_len=64, max_num_seqs=4, drafter=gate, num_speculative_tokens=1)


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_and_changes_nothing(llm: LLM, gate: Gate, name: str) -> None:
    expected = llm.generate("one", PARAMS)[0].outputs[0].token_ids
    errors: list[Any] = []
    gate.enter = lambda: errors.append(in_thread(lambda: CALLS[name](llm)))
    (output,) = llm.generate("one", PARAMS)
    gate.enter = None
    assert output.outputs[0].token_ids == expected
    assert {(type(error), str(error)) for error in errors} == {(RuntimeError, BUSY)}
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize("name", CALLS)
def test_a_drafter_that_calls_is_refused(llm: LLM, gate: Gate, name: str) -> None:
    gate.enter = lambda: CALLS[name](llm)
    with pytest.raises(RuntimeError, match="in the middle of a call, which called it again"):
        llm.generate("one", PARAMS)
    gate.enter = None
    assert len(llm.generate("one", PARAMS)[0].outputs[0].token_ids) == 6


def test_threads_may_take_turns(llm: LLM) -> None:
    expected = llm.generate("one", PARAMS)[0].outputs[0].token_ids
    assert in_thread(lambda: llm.generate("one", PARAMS))[0].outputs[0].token_ids == expected
    outputs = llm.stream("one", PARAMS)
    seen = [next(outputs), in_thread(lambda: next(outputs)), *outputs]
    assert seen[-1].outputs[0].token_ids == expected
    llm.add_request("one", PARAMS)
    reports = []
    while llm.has_unfinished_requests:
        reports += in_thread(llm.step)
    assert reports[0].outputs[0].token_ids == expected


def test_a_stream_dropped_while_another_runs_waits_for_its_end(llm: LLM, gate: Gate) -> None:
    """Its requests are aborted, not in the middle of the step in which the last reference went away."""
    outputs: list[Any] = [llm.stream("two", SamplingParams(max_tokens=40, ignore_eos=True))]
    next(outputs[0])
    expected = llm.generate("one", PARAMS)[0].outputs[0].token_ids
    gate.enter = outputs.clear
    (output,) = llm.generate("one", PARAMS)
    gate.enter = None
    assert output.outputs[0].token_ids == expected
    assert not llm.has_unfinished_requests
    llm.step()
    assert not llm.engine.requests


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_is_refused(llm: LLM, name: str) -> None:
    child, told = raised_in_fork(lambda: CALLS[name](llm))
    assert told == (
        f"RuntimeError: this LLM was made in process {os.getpid()}, and this is process {child}: torch's threads do "
        "not survive a fork. Make an LLM in each process, or start processes by 'spawn'"
    )
