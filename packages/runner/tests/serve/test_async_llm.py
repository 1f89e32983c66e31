"""`AsyncLLM`: many callers share an engine; a caller that leaves frees its requests, and no caller hangs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from bateleur.runner.errors import EngineDead, QueueFull
from in_fork import raised_in_fork

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


async def idle(llm: AsyncLLM) -> bool:
    """Whether the engine has no requests, checked between two steps."""
    return not await llm.inspect(lambda inner: inner.engine.requests)


@contextmanager
def stepping(llm: AsyncLLM, step: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Replace the step of the engine by a function of the test."""
    inner = llm.llm.engine
    original = inner.step
    inner.step = lambda: step(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        inner.step = original  # type: ignore[method-assign]


def test_many_callers_get_what_one_gets_alone(engine: AsyncLLM) -> None:
    prompts = [f"def f{i}(" for i in range(9)]

    async def together() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, prompt) for prompt in prompts))

    alone = [asyncio.run(last(engine, prompt)) for prompt in prompts[:3]]
    outputs = asyncio.run(together())
    assert [output.prompt for output in outputs] == prompts
    for one, other in zip(alone, outputs, strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert len(other.outputs[0].token_ids) == 8


def test_text_grows_and_a_slow_reader_gets_it_in_fewer_parts(engine: AsyncLLM) -> None:
    async def read() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate("import os", SamplingParams(temperature=0, max_tokens=40)):
            outputs.append(output)
            while len(outputs) == 2 and not await idle(engine):
                time.sleep(0.002)  # blocks the event loop as a busy server does
        return outputs

    outputs = asyncio.run(read())
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(outputs) < 10
    assert (
        texts[-1]
        == asyncio.run(last(engine, "import os", SamplingParams(temperature=0, max_tokens=40))).outputs[0].text
    )


@pytest.mark.parametrize("how", ["aclose", "cancel", "abort"])
def test_a_caller_that_leaves_frees_its_request(engine: AsyncLLM, how: str) -> None:
    async def leave() -> None:
        outputs = engine.generate("class A:", LONG, request_id="mine")
        await anext(outputs)
        if how == "aclose":
            await outputs.aclose()  # type: ignore[attr-defined]
        elif how == "abort":
            await engine.abort("mine")
            *_, end = [output async for output in outputs]
            assert end.outputs[0].finish_reason == "abort"
        else:
            task = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await idle(engine)
        free = await engine.inspect(lambda llm: len(llm.engine.table.free_rows))
        assert free == 4

    asyncio.run(leave())


def test_what_is_refused_leaves_nothing(engine: AsyncLLM) -> None:
    async def refused() -> None:
        with pytest.raises(ValueError, match="prompt is empty"):
            await last(engine, "")
        with pytest.raises(ValueError, match="request_id is 7; it must be text"):
            await anext(engine.generate("x", request_id=7))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"prompt\[1\] is -1"):
            await engine.submit(["good", [1, -1]])
        first = engine.generate("x", GREEDY, request_id="same")
        await anext(first)
        with pytest.raises(ValueError, match="a request of that id is already waiting or running"):
            await anext(engine.generate("x", GREEDY, request_id="same"))
        assert [output async for output in first][-1].finished

    asyncio.run(refused())


def test_the_queue_is_bounded(engine: AsyncLLM) -> None:
    async def fill() -> None:
        reader = await engine.submit(["x"] * 16, LONG)
        with pytest.raises(QueueFull, match="12 requests are waiting already, which is max_queued_requests"):
            await last(engine, "y")
        engine.abort_unfinished(reader)
        assert await idle(engine)
        assert (await last(engine, "y")).finished
        with pytest.raises(ValueError, match=r"17 sequences are asked for at once; .* leave room for 16"):
            await engine.submit(["x"] * 17)

    asyncio.run(fill())


def test_a_loop_that_was_closed_takes_its_requests_along(engine: AsyncLLM) -> None:
    async def forget() -> None:
        await engine.submit(["x"], LONG)

    asyncio.run(forget())
    deadline = time.monotonic() + 20
    while not asyncio.run(idle(engine)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asyncio.run(idle(engine))


def test_a_step_that_raises_changes_no_token(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    expected = asyncio.run(last(engine, "for i in")).outputs[0].token_ids
    failures = [0]

    def step(original: Callable[[], Any]) -> Any:
        failures[0] += 1
        result = original()
        if failures[0] in (2, 3, 5):
            engine.llm.engine.registry.consistent = False
            raise OSError("a cable is loose")
        return result

    with stepping(engine, step):
        output = asyncio.run(last(engine, "for i in"))
    assert output.outputs[0].token_ids == expected
    assert output.num_preemptions == 3
    assert caplog.text.count("a step failed; its requests are computed again: OSError: a cable is loose") == 3


def test_a_request_that_ended_in_a_step_that_raised_may_be_aborted(engine: AsyncLLM) -> None:
    registry = engine.llm.engine.registry
    original, left = registry.report, ["ended"]

    def report(request: Any) -> None:
        if request.finish_reason is not None and request.request_id in left:
            left.clear()
            engine._thread.abort(["ended"])
            raise OSError("a cable is loose")
        original(request)

    async def both() -> list[RequestOutput]:
        other = asyncio.ensure_future(last(engine, "x"))
        outputs = [output async for output in engine.generate("x", GREEDY, request_id="ended")]
        return [outputs[-1], await other]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "report", report)
        ended, other = asyncio.run(both())
    assert not left
    assert ended.outputs[0].finish_reason == "length"
    assert ended.outputs[0].token_ids == other.outputs[0].token_ids


def test_an_idle_engine_takes_no_time_of_a_processor(engine: AsyncLLM) -> None:
    asyncio.run(last(engine, "x"))
    asyncio.run(idle(engine))
    assert engine._thread.ident is not None
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.1)
    assert time.clock_gettime(clock) - before < 0.01


def test_a_fork_is_refused(engine: AsyncLLM) -> None:
    child, told = raised_in_fork(lambda: asyncio.run(last(engine, "x")))
    assert told.startswith(f"RuntimeError: this LLM was made in process {os.getpid()}, and this is process {child}")


def small() -> AsyncLLM:
    return AsyncLLM(device="cpu", max_model_len=128, max_num_seqs=2)


def test_a_dead_engine_tells_everybody(caplog: pytest.LogCaptureFixture) -> None:
    llm = small()

    def broken(original: Callable[[], Any]) -> None:
        raise OSError("the device is gone")

    async def die() -> None:
        waiting = [asyncio.ensure_future(last(llm, "x", LONG)) for _ in range(3)]
        await anext(llm.generate("x", LONG))
        with stepping(llm, broken):
            for each in waiting:
                with pytest.raises(EngineDead, match="the engine died of OSError: the device is gone") as told:
                    await each
                assert isinstance(told.value.__cause__, OSError)
        with pytest.raises(EngineDead):
            await last(llm, "x")
        assert isinstance(llm.error, OSError)
        assert (await llm.get_metrics()).num_steps > 0
        await llm.close()

    asyncio.run(die())
    assert caplog.text.count("a step failed") == 2
    assert "the engine has died" in caplog.text


def test_an_engine_that_dies_while_it_loads_an_adapter_tells_its_caller(tmp_path: Path) -> None:
    llm = AsyncLLM(device="cpu", max_model_len=128, max_num_seqs=2, enable_lora=True)

    def broken(*requests: Any) -> None:
        raise OSError("the device is gone")

    async def ask() -> None:
        await llm.inspect(lambda inner: setattr(inner, "add_prepared", broken))
        with pytest.raises(EngineDead, match="the engine died of OSError: the device is gone"):
            await asyncio.wait_for(llm.submit(["x"], lora_request=LoRARequest("a", 1, str(tmp_path))), 10)
        await llm.close()

    asyncio.run(ask())


def test_close_drains_or_aborts_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    llm = small()

    async def close() -> None:
        task = asyncio.ensure_future(last(llm, "x", SamplingParams(max_tokens=20, ignore_eos=True)))
        endless = asyncio.ensure_future(last(llm, "x", LONG))
        while llm.num_unfinished < 2:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(llm.close(drain=True))
        assert len((await task).outputs[0].token_ids) == 20
        with pytest.raises(EngineDead, match="it was closed"):
            await last(llm, "x")
        assert not draining.done()
        await llm.close()
        assert (await endless).outputs[0].finish_reason == "abort"
        await draining

    asyncio.run(close())
    assert llm.error is None
    assert set(threading.enumerate()) <= before


def test_one_that_is_forgotten_ends_by_itself() -> None:
    llm = small()
    thread = llm._thread
    asyncio.run(last(llm, "x"))
    del llm
    thread.join(20)
    assert not thread.is_alive()


def test_a_long_text_does_not_delay_others(engine: AsyncLLM) -> None:
    released = threading.Event()

    async def ask() -> None:
        slow = [asyncio.create_task(engine.run_in_thread(lambda: released.wait(60), long=True)) for _ in range(6)]
        await asyncio.sleep(0)
        await last(engine, "def f(")
        assert not any(each.done() for each in slow)
        released.set()
        assert all(await asyncio.gather(*slow))

    asyncio.run(ask())


def test_a_slow_grammar_does_not_delay_others(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More slow requests than threads do not delay other requests."""
    grammars, released = engine.llm._input_processor.grammars, threading.Event()
    original = grammars.matcher

    def matcher(*args: Any, **options: Any) -> Any:
        assert released.wait(60)
        return original(*args, **options)

    monkeypatch.setattr(grammars, "matcher", matcher)
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, temperature=0)

    async def ask() -> list[RequestOutput]:
        slow = [asyncio.create_task(last(engine, "x", params)) for _ in range(6)]
        await asyncio.sleep(0)
        await last(engine, "def f(")
        assert not any(each.done() for each in slow)
        released.set()
        return await asyncio.gather(*slow)

    assert {output.outputs[0].text for output in asyncio.run(ask())} <= {"yes", "no"}


def test_the_model_is_made_in_the_thread_that_runs_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP keeps a thread team per computing thread; two teams on two cores slow each other down."""
    seen: list[tuple[str, int]] = []
    make, step = LLM.__init__, LLM.step

    def made(self: LLM, *args: Any, **options: Any) -> None:
        seen.append(("made", threading.get_ident()))
        make(self, *args, **options)

    def stepped(self: LLM) -> Any:
        seen.append(("stepped", threading.get_ident()))
        return step(self)

    monkeypatch.setattr(LLM, "__init__", made)
    monkeypatch.setattr(LLM, "step", stepped)

    async def one_token() -> None:
        llm = AsyncLLM(max_num_seqs=1, max_model_len=32)
        async for _ in llm.generate("x", SamplingParams(max_tokens=1)):
            pass
        await llm.close()

    asyncio.run(one_token())
    assert {kind for kind, _ in seen} == {"made", "stepped"}
    (thread,) = {thread for _, thread in seen}
    assert thread != threading.get_ident()


def test_what_is_wrong_with_a_model_is_raised_where_it_is_asked_for() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        AsyncLLM(max_num_seqs=0)
    assert {thread.name for thread in threading.enumerate()} == before
