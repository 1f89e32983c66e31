"""A rank that dies, hangs, raises or disagrees ends the engine with its name and the reason; no process hangs or
remains.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import FailsLater

from bateleur.runner import LLM, AsyncLLM, SamplingParams
from bateleur.runner.errors import EngineDead, RankFailed

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture
def settings(tiny: Callable[..., Path]) -> dict[str, Any]:
    """Options of an engine with two ranks."""
    sizes: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 8}
    named: dict[str, Any] = {"model": tiny("llama", **sizes), "skip_tokenizer_init": True}
    return named | {"device": "cpu", "max_num_seqs": 2, "tensor_parallel_size": 2}


@pytest.fixture
def llm(settings: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**settings) as made:
        yield made


def pids(llm: LLM) -> list[int]:
    """Process ids of the other ranks."""
    assert llm._leader is not None
    found = [member.process for member in llm._leader._monitor.ranks]
    return [each.pid for each in found if each is not None]


def begun(llm: LLM) -> int:
    """Start requests; returns the process id of rank 1."""
    llm.add_request(PROMPT, LONG)
    llm.step()
    (pid,) = pids(llm)
    return pid


def step_for_ever(llm: LLM) -> None:
    while True:
        llm.step()


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([PROMPT], SHORT)


def failed(llm: LLM) -> RankFailed:
    """The error of a call, which later calls raise at once."""
    with pytest.raises(RankFailed) as raised:
        step_for_ever(llm)
    began = time.monotonic()
    for call in (llm.step, lambda: llm.generate([PROMPT], LONG)):
        with pytest.raises(EngineDead):
            call()
    assert time.monotonic() - began < 1
    return raised.value


def test_a_rank_that_is_killed_is_named(llm: LLM) -> None:
    pid = begun(llm)
    os.kill(pid, signal.SIGKILL)
    fault = failed(llm)
    assert (fault.rank, fault.cause) == (1, "was ended by SIGKILL")
    assert not alive(pid)


def test_a_rank_that_stands_still_is_named(settings: dict[str, Any]) -> None:
    with LLM(**settings, rank_timeout=2) as llm:
        pid = begun(llm)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        fault = failed(llm)
        assert 2 <= time.monotonic() - began < 20
        assert fault.rank == 1
        assert fault.cause.startswith("does not answer, 2")
        assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


NGRAM: dict[str, Any] = {"draft": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}


def test_an_error_on_another_rank_has_its_name_and_its_words(settings: dict[str, Any]) -> None:
    with LLM(**settings, **NGRAM, draft_policy=FailsLater("raises", 1)) as llm:
        begun(llm)
        fault = failed(llm)
    assert (fault.rank, fault.cause) == (1, "raised ZeroDivisionError: nothing left")
    assert "in lengths" in fault.__notes__[0]


def test_an_error_on_all_ranks_ends_them(settings: dict[str, Any]) -> None:
    with LLM(**settings, **NGRAM, draft_policy=FailsLater("raises", 0, 1)) as llm:
        pid = begun(llm)
        fault = failed(llm)
        assert fault.cause == "raised ZeroDivisionError: nothing left"
        assert not alive(pid)


def test_a_rank_that_computes_for_too_long_is_named_with_the_place(settings: dict[str, Any]) -> None:
    with LLM(**settings, **NGRAM, draft_policy=FailsLater("sleeps", 1), rank_timeout=2) as llm:
        begun(llm)
        fault = failed(llm)
    assert fault.rank == 1
    assert "< lengths, rank_pool.py:" in fault.cause


def test_ranks_that_disagree_say_about_what(settings: dict[str, Any]) -> None:
    """Rank 1 verifies drafts that rank 0 does not have."""
    with LLM(**settings, **NGRAM, draft_policy=FailsLater("drafts", 1), cudagraph_checks="ADDRESSES") as llm:
        begun(llm)
        fault = failed(llm)
    assert (fault.rank, fault.cause) == (1, "disagrees with rank 0 about query_lens of the step")


def test_every_request_of_an_async_engine_hears_of_it(settings: dict[str, Any]) -> None:
    async def ask(llm: AsyncLLM) -> str:
        try:
            async for _ in llm.generate(PROMPT, LONG):
                pass
        except EngineDead as dead:
            return str(dead)
        return "it ended"

    async def main() -> list[str]:
        llm = AsyncLLM(**settings)
        requests = [asyncio.create_task(ask(llm)) for _ in range(3)]
        while llm.llm.get_metrics().num_emitted_tokens < 4:
            await asyncio.sleep(0.01)
        (pid,) = pids(llm.llm)
        os.kill(pid, signal.SIGKILL)
        told = await asyncio.gather(*requests)
        told.append(await ask(llm))
        assert isinstance(llm.error, RankFailed)
        await llm.close()
        return told

    for told in asyncio.run(main()):
        assert "rank 1 was ended by SIGKILL" in told


def test_requests_hear_of_it_where_the_first_rank_hangs(settings: dict[str, Any]) -> None:
    policy = FailsLater("sleeps", 0)

    async def main() -> None:
        llm = AsyncLLM(**settings, **NGRAM, draft_policy=policy, rank_timeout=1)
        try:
            with pytest.raises(EngineDead, match=r"rank 0 has stood still for 1.* s in .* < lengths, rank_pool.py"):
                async for _ in llm.generate(PROMPT, LONG):
                    pass
        finally:
            policy.wake.set()
            await llm.close()

    asyncio.run(main())


def test_an_interrupt_waits_for_the_end_of_a_step_and_the_engine_goes_on(llm: LLM) -> None:
    wanted = llm.generate([PROMPT], SHORT)[0].outputs[0].token_ids
    steps = llm.get_metrics().num_steps
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT by default
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, ctrl_c)
    assert llm.get_metrics().num_steps > steps
    assert llm.generate([PROMPT], SHORT)[0].outputs[0].token_ids == wanted


def test_a_request_that_cannot_be_sent_is_refused_and_the_others_go_on(llm: LLM) -> None:
    class Local(SamplingParams):
        """A local class, which other processes cannot import."""

    wanted = llm.generate([PROMPT], SHORT)[0].outputs[0].token_ids
    llm.add_request(PROMPT, SHORT, request_id="kept")
    with pytest.raises(ValueError, match="request_id is 'lost'; it and its params must be what pickle can send"):
        llm.add_request(PROMPT, Local(max_tokens=2), request_id="lost")
    reports = [report for _ in range(40) for report in llm.step()]
    assert [report.request_id for report in reports if report.finished] == ["kept"]
    assert reports[-1].outputs[0].token_ids == wanted


def test_a_request_that_cannot_be_sent_ends_no_async_engine(settings: dict[str, Any]) -> None:
    class Local(SamplingParams):
        """A local class, which other processes cannot import."""

    async def main() -> None:
        llm = AsyncLLM(**settings)
        other = llm.generate(PROMPT, SHORT)
        await anext(other)
        with pytest.raises(ValueError, match="request_id is 'lost'; it and its params must be what pickle can send"):
            await anext(llm.generate(PROMPT, Local(max_tokens=2), request_id="lost"))
        *_, output = [output async for output in other]
        assert output.outputs[0].finish_reason == "length"
        assert llm.num_unfinished == 0
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3; it must divide num_attention_heads = 8: 1, 2, 4, 8"),
        (
            NGRAM | {"draft_policy": type("Local", (), {"lengths": None})()},
            "it must be something that pickle can send to other ranks",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(settings: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(**(settings | options))


def test_ranks_end_with_their_engine(settings: dict[str, Any]) -> None:
    llm = LLM(**settings)
    (pid,) = pids(llm)
    llm.close()
    llm.close()
    assert not alive(pid)
    with pytest.raises(EngineDead, match=r"^it was closed$"):
        llm.generate([PROMPT])
    llm = LLM(**settings)
    (pid,) = pids(llm)
    del llm
    assert not alive(pid)


SCRIPT = """
import sys, time
from bateleur.runner import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2)
print(llm._leader._monitor.ranks[0].process.pid, flush=True)
if sys.argv[2] == "runs":
    llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=100000, ignore_eos=True))
"""


@pytest.mark.parametrize("how", ["returns", "runs"])
def test_ranks_end_with_the_first(settings: dict[str, Any], how: str) -> None:
    """Ranks started without fork: the first one returns silently, or is killed in a step."""
    command = [sys.executable, "-c", SCRIPT, settings["model"], how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if how == "runs":
            time.sleep(0.5)
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if how == "runs" else 0)
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_rank_that_hangs_is_named_and_not_one_that_waits_for_it(
    settings: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    """Of three ranks, rank 2 hangs outside of a collective. Ranks 0 and 1 wait for it in a collective."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 24, "num_hidden_layers": 1}
    three = settings | {"model": tiny("llama", **sizes), "tensor_parallel_size": 3}
    with LLM(**three, **NGRAM, draft_policy=FailsLater("sleeps", 2), rank_timeout=2) as llm:
        llm.add_request(PROMPT, LONG)
        fault = failed(llm)
    assert fault.rank == 2
    assert "< lengths, rank_pool.py:" in fault.cause
