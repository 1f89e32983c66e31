"""`AsyncLLM`: an `LLM` in a thread of its own, for many callers in event loops."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bateleur.runner.engine.input_processor import Prompt
from bateleur.runner.engine_thread import EngineThread, Reader
from bateleur.runner.errors import EngineDead
from bateleur.runner.llm import LLM
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.tokenizer import NoTokenizer
from bateleur.runner.utils.arguments import Integer, maybe, text

T = TypeVar("T")

_ADMITTING_THREADS = 4
"""Prompts that are tokenised at once."""
_COMPILING_THREADS = 2
"""Requests whose grammars are compiled at once. That may take seconds, so no others wait behind them."""
_LONG_THREADS = 2
"""Texts of any length that are tokenised at once. That may take half a minute."""


class AsyncLLM:
    """A model ready to generate for many callers at once.

    It owns an `LLM` and a thread that alone calls it; prompts are tokenised in other threads. Callers may be in any
    event loop, or in several, and leave one for the next. A step that raises costs its requests a recomputation and
    nobody else anything. When three fail in a row the engine is dead: `error` says of what, and whoever waits, or comes
    later, gets EngineDead.

    model, options: as for `LLM`.
    max_queued_requests: how many may wait beside those that run; one more is refused by QueueFull.

    Raises ValueError as `LLM` does.
    """

    def __init__(
        self, /, model: str | Path | None = None, *, max_queued_requests: int = 1024, **options: Any
    ) -> None:
        waiting = Integer(0)("max_queued_requests", max_queued_requests)
        self._thread = EngineThread(partial(LLM, model, **options), waiting)
        self._thread.open()
        self.llm = self._thread.llm
        """To be read: `config`, `spec`, `limits`, `tokenizer`. Calls of its methods are the thread's alone."""
        if not isinstance(self.llm.tokenizer, NoTokenizer):
            self.llm.tokenizer.encode(
                "once"
            )  # what a tokenizer sets up for itself, it does before threads come
        self._closing = False
        self._places = self._thread.places
        self._admitting = ThreadPoolExecutor(_ADMITTING_THREADS, "bateleur-admission")
        self._compiling = ThreadPoolExecutor(_COMPILING_THREADS, "bateleur-grammars")
        self._reading = ThreadPoolExecutor(_LONG_THREADS, "bateleur-long-texts")
        self._end = weakref.finalize(self, self._thread.stop_and_join)

    @property
    def error(self) -> BaseException | None:
        """What the engine died of; None while it lives."""
        return self._thread.error

    @property
    def num_unfinished(self) -> int:
        """Requests that are here: those being tokenised, waiting or running."""
        return len(self._places)

    # --- requests -----------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield what the request's `output_kind` says after each of its steps, until it has ended.

        Whoever reads slowly sees fewer reports, larger ones where they are deltas. Leaving the iterator aborts the
        request: its row is free within a step, at the latest when the iterator is closed.

        Raises ValueError for what could never run, QueueFull, EngineDead; RuntimeError in a forked process.
        """
        reader = await self.submit([prompt], sampling_params, request_ids=[request_id], priority=priority)
        try:
            while outputs := await reader.read():
                for output in outputs:
                    yield output
        finally:
            self.leave(reader)

    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str | None] | None = None,
        priority: int = 0,
    ) -> Reader:
        """Queue requests together, all or none; the `Reader` of their reports, for `leave` in any case.

        Raises as `generate`.
        """
        self.llm.check_process()
        if (dead := self._thread.ended) is not None:
            raise EngineDead(*dead.args) from self.error
        if self._closing:
            raise EngineDead("it was closed")
        check = maybe(text)
        ids = [check("request_id", each) for each in request_ids or [None] * len(prompts)]
        given = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        names = self._places.take(ids, given.n if isinstance(given, SamplingParams) else 1)

        def prepare() -> list[RequestGroup]:
            return [
                self.llm.prepare(prompt, sampling_params, request_id=name, priority=priority)
                for prompt, name in zip(prompts, names, strict=True)
            ]

        compiles = getattr(given, "structured_outputs", None) is not None
        long = getattr(given, "truncate_prompt_tokens", None) is not None
        try:
            requests = await (
                self._run_in(self._compiling, prepare) if compiles else self.aside(prepare, long=long)
            )
        except BaseException:
            self._thread.release(names)
            raise
        reader = Reader(requests)
        self._thread.add(requests, reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """End what has not ended of these requests; nobody reads them any more."""
        if reader.unfinished:
            self._thread.abort(reader.unfinished)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what it has, with the `finish_reason` "abort". An unknown id is none."""
        self._thread.abort([text("request_id", request_id)])

    async def aside(self, function: Callable[[], T], *, long: bool = False) -> T:
        """Run what takes time and is no step, such as making a prompt, in a thread beside the event loop.

        long: it may take many times as long as a prompt that the model could read, so no prompts wait behind it.
        """
        return await self._run_in(self._reading if long else self._admitting, function)

    @staticmethod
    async def _run_in(threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    # --- the engine ---------------------------------------------------------------------------------------

    async def inspect(self, look: Callable[[LLM], T]) -> T:
        """What a function finds between two steps, or in an engine that has ended."""
        return await asyncio.wrap_future(self._thread.call(look))

    async def get_metrics(self) -> EngineStats:
        """Counters since the start, as they were between two steps."""
        return await self.inspect(lambda llm: deepcopy(llm.get_metrics()))

    async def close(self, *, drain: bool = False) -> None:
        """Refuse what comes, and end: when all requests have, with `drain`, or by aborting them before the next step.

        A second call may come while one drains.
        """
        self._closing = True
        self._thread.stop(drain=drain)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        self._thread.join()
        self._admitting.shutdown()
        self._compiling.shutdown()
        self._reading.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
