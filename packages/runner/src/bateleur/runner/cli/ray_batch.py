"""Runs a file of requests on replicas: Ray Data distributes chunks of the file over a pool of engine actors.

Only line positions and results pass through Ray; the actors read the file. A chunk whose actor dies is retried. Lines
without a result then run one at a time, so that a line that kills engines fails alone.
"""

import asyncio
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.util.annotations import RayDeprecationWarning

from bateleur.runner.cli.batch import Result, ended_result, failed_result
from bateleur.runner.cli.line_formats import ApiRequest, LineRequest
from bateleur.runner.cli.request_file import FileChunk, LineParser, RequestFile
from bateleur.runner.errors import EngineDead
from bateleur.runner.outputs import RequestOutput, RequestOutputKind
from bateleur.runner.replicas.application import DeploymentPlan
from bateleur.runner.replicas.engine_replica import open_engine
from bateleur.runner.replicas.server import ray_cluster

_CHUNK_LINES = 8  # requests per chunk; their results arrive together
_RETRIES = 2  # retries of a chunk whose actor dies
_MAX_QUEUED_REQUESTS = 1_000_000  # no limit in practice: the number of chunks per actor limits the queue of its engine


def run_on_ray(requests: RequestFile, has_result: Callable[[int], bool], plan: DeploymentPlan) -> Iterator[Result]:
    """Yield the result of each request that has none yet. has_result: returns whether a line has a result by now."""
    with ray_cluster(plan.replicas.ray_address, plan.num_cpus):
        for size, per_actor in ((_CHUNK_LINES, -(-2 * plan.max_num_seqs // _CHUNK_LINES)), (1, 1)):
            chunks = [{"chunk": pickle.dumps(chunk)} for chunk in requests.chunks(has_result, size)]
            if chunks:
                yield from _run_chunks(chunks, requests.parser, plan, per_actor)
    for request in requests.remaining(has_result):
        yield failed_result(requests.parser.format, request, f"{request.where}: every engine that ran it has died")


def _run_chunks(
    chunks: list[dict[str, bytes]], parser: LineParser, plan: DeploymentPlan, per_actor: int
) -> Iterator[Result]:
    """Run chunks on Ray and yield their results.

    chunks: rows with a pickled `FileChunk` each. per_actor: number of chunks that one actor runs concurrently.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # lines of dead actors run again one by one, or get an error as result
    resources = plan.resources(ray.cluster_resources().get("GPU", 0))
    pool = ActorPoolStrategy(
        size=min(plan.replicas.replicas, len(chunks)),
        max_tasks_in_flight_per_actor=per_actor,
        max_concurrent_calls_per_actor=per_actor,
    )
    with warnings.catch_warnings(action="ignore", category=RayDeprecationWarning):
        # The number of retries is a remote argument: map_batches has no parameter for it yet.
        results = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
            _EngineActor,
            batch_size=1,
            compute=pool,
            fn_constructor_args=(plan.engine, plan.num_threads, parser),
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            max_task_retries=_RETRIES,
            max_restarts=-1,
        )
    # No prefetch: it would hold back a finished chunk until the next one has ended.
    for chunk in results.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
        for line, record, error in zip(chunk["line"], chunk["record"], chunk["error"], strict=True):
            yield int(line), json.loads(record), error or None


class _EngineActor:
    """A Ray actor with one engine, which runs several chunks concurrently."""

    def __init__(self, engine: Mapping[str, Any], num_threads: int | None, parser: LineParser) -> None:
        self._llm, self._parser = open_engine(engine, num_threads, _MAX_QUEUED_REQUESTS), parser

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the pickled `FileChunk` of `batch`, and return its results as columns."""
        chunk: FileChunk = pickle.loads(batch["chunk"][0])
        try:
            rows = await asyncio.gather(*map(self._result, chunk.requests(self._parser)))
        except EngineDead:
            os._exit(1)  # Ray restarts the actor
        lines, records, errors = zip(*rows, strict=True)
        return {
            "line": np.array(lines, np.int64),
            "record": np.array([json.dumps(each) for each in records], object),
            "error": np.array([each or "" for each in errors], object),
        }

    async def _result(self, request: LineRequest) -> Result:
        line_format = self._parser.format
        if request.api_request is None:
            return failed_result(line_format, request, str(request.error))
        try:
            outputs = await self._outputs(request, request.api_request)
        except ValueError as error:
            return failed_result(line_format, request, f"{request.where}: {error}")
        return ended_result(line_format, request, outputs, self._llm.llm.tokenizer)

    async def _outputs(self, request: LineRequest, api_request: ApiRequest) -> list[RequestOutput]:
        tokenizer = self._llm.llm.tokenizer
        inputs = await self._llm.run_in_thread(lambda: self._parser.format.engine_inputs(api_request, tokenizer))
        names = [f"{request.line}-{number}" for number in range(len(inputs))]
        prompts = [prompt for prompt, _ in inputs]  # all have the same parameters
        params = replace(inputs[0][1], output_kind=RequestOutputKind.FINAL_ONLY)
        reader = await self._llm.submit(prompts, params, request_ids=names, priority=api_request.priority)
        ended: dict[str, RequestOutput] = {}
        try:
            while outputs := await reader.read():
                ended |= {output.request_id: output for output in outputs if output.finished}
        finally:
            self._llm.abort_unfinished(reader)
        return [ended[name] for name in names]
