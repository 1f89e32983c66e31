"""A file of requests on several engines: Ray Data hands parts of it to a pool of actors, and gives back results.

What goes through Ray is where lines are, and their results; actors read the file themselves. A part whose actor dies is
tried again; what does not come back then is asked line by line, one at a time, so that a line of which engines die
fails alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.util.annotations import RayDeprecationWarning

from bateleur.runner.cli.line_forms import LineRequest
from bateleur.runner.cli.request_file import LineReader, Part, RequestFile
from bateleur.runner.errors import EngineDead
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.replicas.application import Plan
from bateleur.runner.replicas.server import started

Row: TypeAlias = tuple[int, dict[str, Any], str | None]
"""A line, its result, and what went wrong."""

_LINES = 8
"""Of a part: its results come together."""
_TRIES = 2
"""Times that a part is tried again when its actor dies."""
_MANY = 1_000_000
"""Requests that an engine lets wait: parts bound them."""


def results_on_ray(requests: RequestFile, has: Callable[[int], bool], plan: Plan) -> Iterator[Row]:
    """Each request that has no result, as it ends. has: whether a line has one by now."""
    with started(plan.replicas.ray_address, plan.cpus):
        for size, at_once in ((_LINES, -(-2 * plan.rows // _LINES)), (1, 1)):
            parts = [{"part": pickle.dumps(part)} for part in requests.parts(has, size)]
            if parts:
                yield from _round(parts, requests.reader, plan, at_once)
    for request in requests.left(has):
        said = f"{request.where}: every engine that read it has died"
        yield request.line, requests.form.failed(request, said), said


def _round(parts: list[dict[str, bytes]], reader: LineReader, plan: Plan, at_once: int) -> Iterator[Row]:
    """at_once: parts that an actor has, all of which are tried again when it dies."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.max_errored_blocks = -1  # those of dead actors: their lines have another round, or are told
    resources = plan.resources(ray.cluster_resources().get("GPU", 0))
    pool = ActorPoolStrategy(
        size=min(plan.replicas.replicas, len(parts)),
        max_tasks_in_flight_per_actor=at_once,
        max_concurrent_calls_per_actor=at_once,
    )
    with warnings.catch_warnings(action="ignore", category=RayDeprecationWarning):
        # How often a part is tried has no name among the arguments yet.
        ended = ray.data.from_items(parts, override_num_blocks=len(parts)).map_batches(
            _Engine,
            batch_size=1,
            compute=pool,
            fn_constructor_args=(plan.engine, plan.num_threads, reader),
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_task_retries=_TRIES,
            max_restarts=-1,
        )
    # Without a part that is fetched ahead: it would keep back the one that is there until the next has ended.
    for part in ended.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
        for line, record, error in zip(part["line"], part["record"], part["error"], strict=True):
            yield int(line), json.loads(record), error or None


class _Engine:
    """An actor: an engine, which runs the lines of several parts at once."""

    def __init__(self, engine: Mapping[str, Any], num_threads: int | None, reader: LineReader) -> None:
        import torch

        from bateleur.runner.async_llm import AsyncLLM

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        options = dict(engine)
        self._llm = AsyncLLM(options.pop("model", None), max_queued_requests=_MANY, **options)
        self._reader = reader

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The results of a part."""
        part: Part = pickle.loads(batch["part"][0])
        try:
            rows = await asyncio.gather(*map(self._result, part.requests(self._reader)))
        except EngineDead:
            os._exit(1)  # Ray starts another actor
        lines, records, errors = zip(*rows, strict=True)
        return {
            "line": np.array(lines, np.int64),
            "record": np.array([json.dumps(each) for each in records], object),
            "error": np.array([each or "" for each in errors], object),
        }

    async def _result(self, request: LineRequest) -> Row:
        form = self._reader.form
        if request.asked is None:
            return request.line, form.failed(request, str(request.error)), str(request.error)
        try:
            outputs = await self._outputs(request)
        except ValueError as error:
            said = f"{request.where}: {error}"
            return request.line, form.failed(request, said), said
        ends = (each for output in outputs for each in output.outputs if each.finish_reason == "error")
        wrong = next((f"{request.where}: {each.stop_reason}" for each in ends), None)
        return request.line, form.ended(request, outputs, wrong, self._llm.llm.tokenizer), wrong

    async def _outputs(self, request: LineRequest) -> list[RequestOutput]:
        """Of its prompts, in their order."""
        asked = request.asked
        assert asked is not None
        tokenizer = self._llm.llm.tokenizer
        prepared = await self._llm.aside(lambda: self._reader.form.prepared(asked, tokenizer))
        names = [f"{request.line}-{number}" for number in range(len(prepared))]
        prompts, params = [prompt for prompt, _ in prepared], prepared[0][1]  # which are those of all prompts
        params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        reader = await self._llm.submit(prompts, params, request_ids=names, priority=asked.priority)
        ended: dict[str, RequestOutput] = {}
        try:
            while outputs := await reader.read():
                ended |= {output.request_id: output for output in outputs if output.finished}
        finally:
            self._llm.leave(reader)
        return [ended[name] for name in names]
