"""The application on Ray Serve: `serve run bateleur.runner.replicas.application:app model=DIR replicas=2`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message

from bateleur.runner.config.engine_config import EngineConfig, all_options
from bateleur.runner.errors import EngineDead, QueueFull, ReplicaLost
from bateleur.runner.replicas.call import Call
from bateleur.runner.replicas.config import NOT_OF_RAY, OF_RAY, ReplicaConfig
from bateleur.runner.replicas.front import Front
from bateleur.runner.serve.config import ServeConfig, served_engine
from bateleur.runner.utils.arguments import Integer, refuse
from bateleur.runner.utils.options import Option, options_of

_ROUTER = "bateleur.runner.replicas.ray_router.PrefixRouter"
_PER_FRONT = 16
"""Replicas for which one front is enough."""
_ROWS = 64
"""Requests that run at once in an engine that is not told how many."""
_LAST_WORDS = 5
"""Seconds beside those that running requests have to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that decides an application."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """As for `LLM`."""
    server: ServeConfig = field(default_factory=ServeConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_threads: int | None = None
    """Of a CPU, for each replica; default: Ray's, 1."""

    @property
    def rows(self) -> int:
        """Requests that run at once in a replica, as far as that can be known before."""
        return int(self.engine.get("max_num_seqs") or _ROWS)

    def resources(self, num_gpus: float) -> dict[str, float]:
        """What one replica takes: its ranks are processes of its own, so their devices are of one node, and its alone.

        num_gpus: of the cluster.
        """
        device = str(self.engine.get("device", "auto"))
        on_gpu = device.startswith("cuda") or (device == "auto" and num_gpus > 0)
        sizes = (self.engine.get(name) for name in ("tensor_parallel_size", "data_parallel_size"))
        ranks = math.prod(int(size or 1) for size in sizes)
        if on_gpu:
            return {"CPU": float(self.num_threads or 1), "GPU": float(ranks)}
        return {"CPU": float(ranks * (self.num_threads or 1))}

    @property
    def cpus(self) -> int:
        """Of a Ray that is started for all replicas and the reader of a file: they share what cores there are."""
        replica = self.resources(0)["CPU"]
        return max(os.cpu_count() or 1, int(self.replicas.most * replica) + 1)


def app(args: dict[str, Any]) -> serve.Application:
    """The application of these arguments: options of `LLM`, of `bateleur serve` and of replicas, under their names.

    Values may be text, as a command line has them. Raises ValueError for unknown names and wrong values.
    """
    given = dict(args)
    for name in (*NOT_OF_RAY, *OF_RAY):
        if name in given:
            refuse(name, given[name], "absent: Ray Serve listens, by options of its own")
    threads = given.pop("num_threads", None)
    server = ServeConfig(**_taken(given, options_of(ServeConfig)))
    replicas = ReplicaConfig(**_taken(given, options_of(ReplicaConfig)))
    engine = served_engine(_taken(given, all_options()) | given)
    EngineConfig.of(**engine)
    threads = None if threads is None else Integer(1)("num_threads", int(threads))
    return application(Plan(engine=engine, server=server, replicas=replicas, num_threads=threads))


def application(plan: Plan) -> serve.Application:
    """Fronts, and the replicas behind them."""
    replicas, server = plan.replicas, plan.server
    resources = plan.resources(ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0)
    ends = {
        "graceful_shutdown_timeout_s": server.shutdown_timeout + _LAST_WORDS,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    several: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.most > replicas.replicas:
        target = replicas.target_ongoing_requests or plan.rows
        several = {
            "autoscaling_config": {
                "min_replicas": replicas.replicas,
                "max_replicas": replicas.most,
                "target_ongoing_requests": target,
                "upscale_delay_s": replicas.upscale_delay,
                "downscale_delay_s": replicas.downscale_delay,
            }
        }
    options = {"imbalance": replicas.replica_imbalance, "slack": replicas.replica_slack}
    engines = serve.deployment(
        _Engine,
        name="engine",
        **several,
        **ends,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0.0)},
        **_placed(resources),
        max_ongoing_requests=2 * plan.rows + _PER_FRONT,
        max_queued_requests=max(server.max_queued_requests, _PER_FRONT),  # to be sent on takes a moment, too
        health_check_period_s=2,
        health_check_timeout_s=replicas.health_check_timeout,
        request_router_config={"request_router_class": _ROUTER, "request_router_kwargs": options},
    )
    fronts = serve.deployment(
        _Front,
        name="front",
        **ends,
        num_replicas=1 + (replicas.most - 1) // _PER_FRONT,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
    )
    behind = replace(server, api_key=(), allowed_origins=(), uds=None)
    return fronts.bind(engines.bind(plan.engine, behind, plan.num_threads), server)


class _Engine:
    """`EngineReplica` in a process of Ray's."""

    def __init__(self, engine: Mapping[str, Any], config: ServeConfig, num_threads: int | None) -> None:
        import torch

        from bateleur.runner.async_llm import AsyncLLM
        from bateleur.runner.replicas.engine_replica import EngineReplica

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        options = dict(engine)
        llm = AsyncLLM(options.pop("model", None), max_queued_requests=config.max_queued_requests, **options)
        llm.llm.prepare_structured_outputs()
        self._replica = EngineReplica(serve.get_replica_context().replica_tag, llm, config)

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        async for messages in self._replica.answer(call):
            yield messages

    async def metrics(self) -> tuple[str, str]:
        return await self._replica.metrics()

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._replica.close()


class _FrontOfEngines:
    """`Front` in a process of Ray's, which reads requests, and streams answers of replicas."""

    def __init__(self, engines: serve.handle.DeploymentHandle, config: ServeConfig) -> None:
        self._engines = engines
        self._front = Front(self._ask, self._metrics, config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._front.app()

    async def drain(self, seconds: float) -> None:
        """Let nobody in, and wait for those who are."""
        await self._front.drain(seconds)

    async def _ask(self, call: Call) -> AsyncGenerator[list[Message], None]:
        answers = self._engines.options(stream=True).answer.remote(call)
        try:
            async for messages in answers:
                yield messages
        except RayActorError as error:
            raise ReplicaLost(str(error)) from error
        except BackPressureError as error:
            raise QueueFull("max_queued_requests are waiting for a replica") from error
        except DeploymentUnavailableError as error:
            raise EngineDead(str(error)) from error
        finally:
            with suppress(Exception):
                answers.cancel()

    async def _metrics(self) -> dict[str, str]:
        return dict(await self._engines.broadcast("metrics").results_async(timeout_s=10))


_Front = serve.ingress()(_FrontOfEngines)


def _placed(resources: Mapping[str, float]) -> dict[str, Any]:
    """One bundle for all ranks of a replica: they are its children, on its node."""
    if resources.get("GPU", 0.0) <= 1:
        return {}
    return {"placement_group_bundles": [dict(resources)], "placement_group_strategy": "STRICT_PACK"}


def _taken(given: dict[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Those of the arguments that are these options, out of all."""
    return {each.name: _typed(given.pop(each.name), each) for each in options if each.name in given}


def _typed(value: Any, option: Option) -> Any:
    """Text becomes what it spells in JSON, unless the option is text; a sequence may be one text alone."""
    if not isinstance(value, str) or option.type.startswith("str"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return [value] if option.type.startswith("Sequence[str]") else value
