"""`AsyncLLM`: an `LLM` in its own thread, for many callers in event loops."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from bateleur.runner.engine.input_processor import Prompt
from bateleur.runner.engine_thread import EngineThread, OutputReader
from bateleur.runner.errors import EngineDead
from bateleur.runner.llm import LLM
from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.tokenizer import NoTokenizer
from bateleur.runner.utils.arguments import Integer, maybe, text

T = TypeVar("T")

_THREADS = {"admission": 4, "grammars": 2, "long-texts": 2}
"""Maximum numbers of requests that are prepared at once, by what takes the time. Compiling a grammar may take seconds,
and tokenising a text of unbounded length half a minute, so prompts must not queue with these."""


class AsyncLLM:
    """Generates text for many concurrent callers.

    It owns an `LLM` and the only thread that calls it; prompts are tokenised in other threads. Callers may run in
    several event loops at once. If a step raises, its requests are recomputed and other requests are not affected.
    After three failures in a row the engine is dead: `error` has the cause, and current and later requests raise
    EngineDead.

    model, options: arguments of `LLM`. max_queued_requests: maximum number of waiting requests; one more raises
    QueueFull. Raises ValueError as `LLM` does.
    """

    def __init__(self, /, model: str | Path | None = None, *, max_queued_requests: int = 1024, **options: Any) -> None:
        waiting = Integer(0)("max_queued_requests", max_queued_requests)
        self._thread = EngineThread(partial(LLM, model, **options), waiting)
        self._thread.open()
        self.llm = self._thread.llm
        """The engine; read `config`, `spec`, `limits`, `tokenizer` only. Its methods are called by the engine thread
        alone."""
        if not isinstance(self.llm.tokenizer, NoTokenizer):
            self.llm.tokenizer.encode("once")  # initialises the tokenizer before several threads use it
        self._closing = False
        self._admission_limit = self._thread.admission_limit
        self._executors = {name: ThreadPoolExecutor(most, f"bateleur-{name}") for name, most in _THREADS.items()}
        weakref.finalize(self, self._thread.stop_and_join)

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the engine; None while it runs."""
        return self._thread.error

    @property
    def num_unfinished(self) -> int:
        """Number of requests being tokenised, waiting or running."""
        return len(self._admission_limit)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs after each step of the request, as `output_kind` says, until it ends.
        A slow reader gets fewer outputs; deltas are merged. Leaving the iterator aborts the request, at the latest when
        the iterator is closed. The request stops within one step.
        Raises ValueError if the request could never run, QueueFull, EngineDead; RuntimeError in a forked process.
        Parameters: see `LLM.add_request`.
        """
        reader = await self.submit(
            [prompt], sampling_params, request_ids=[request_id], priority=priority, lora_request=lora_request
        )
        try:
            while outputs := await reader.read():
                for output in outputs:
                    yield output
        finally:
            self.abort_unfinished(reader)

    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str | None] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        continued: bool = False,
    ) -> OutputReader:
        """Queue requests, all or none, and return their `OutputReader`. Call `abort_unfinished` at the end.
        request_ids: one per prompt; None lets the engine choose. continued: whether they continue requests that were
        admitted, so that QueueFull is not raised. Other parameters and errors: see `generate`.
        """
        self.llm.check_process()
        if (dead := self._thread.ended) is not None:
            raise EngineDead(*dead.args) from self.error
        if self._closing:
            raise EngineDead("it was closed")
        check = maybe(text)
        ids = [check("request_id", each) for each in request_ids or [None] * len(prompts)]
        given = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        size = given.n if isinstance(given, SamplingParams) else 1
        names = self._admission_limit.take(ids, size, continued=continued)

        def prepare() -> list[RequestGroup]:
            return [
                self.llm.prepare(prompt, sampling_params, request_id=name, priority=priority, lora_request=lora_request)
                for prompt, name in zip(prompts, names, strict=True)
            ]

        executor = "long-texts" if getattr(given, "truncate_prompt_tokens", None) is not None else "admission"
        if getattr(given, "structured_outputs", None) is not None:
            executor = "grammars"
        try:
            requests = await self._run_in(executor, prepare)
        except BaseException:
            self._thread.release(names)
            raise
        reader = OutputReader(requests)
        self._thread.add(requests, reader)
        if lora_request is not None:  # which is loaded now
            try:
                await asyncio.wrap_future(reader.queued)
            except asyncio.CancelledError:
                self.abort_unfinished(reader)
                raise
        return reader

    def abort_unfinished(self, reader: OutputReader) -> None:
        """Abort the requests of a reader that have not ended."""
        if reader.unfinished:
            self._thread.abort(reader.unfinished)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets the output so far with `finish_reason` "abort". An unknown id is ignored."""
        self._thread.abort([text("request_id", request_id)])

    async def run_in_thread(self, function: Callable[[], T], *, long: bool = False) -> T:
        """Run a slow function that is not a step, such as tokenisation, in another thread; return its result.
        long: whether it may take much longer than tokenising a prompt; it then uses threads on which no prompt waits.
        """
        return await self._run_in("long-texts" if long else "admission", function)

    async def _run_in(self, executor: str, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executors[executor], function)

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter; see `LLM.add_lora`."""
        await self.inspect(lambda llm: llm.add_lora(lora_request))

    async def remove_lora(self, lora_name: str) -> None:
        """Unload an adapter; see `LLM.remove_lora`."""
        await self.inspect(lambda llm: llm.remove_lora(lora_name))

    async def list_loras(self) -> dict[str, Path]:
        """Return folders of loaded adapters by name; see `LLM.list_loras`."""
        return await self.inspect(lambda llm: llm.list_loras())

    async def inspect(self, look: Callable[[LLM], T]) -> T:
        """Call `look(llm)` in the engine thread, between two steps or after the engine has ended; return its result."""
        return await asyncio.wrap_future(self._thread.call(look))

    async def get_metrics(self) -> EngineStats:
        """Return counters since the start, read between two steps."""
        return await self.inspect(lambda llm: deepcopy(llm.get_metrics()))

    async def close(self, *, drain: bool = False) -> None:
        """Refuse new requests and end the engine. `drain`: finish all requests first; else abort them before the next
        step. It may be called a second time while the first call drains.
        """
        self._closing = True
        self._thread.stop(drain=drain)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        self._thread.join()
        for executor in self._executors.values():
            executor.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
