"""The Ray Serve application: `serve run bateleur.runner.replicas.application:app model=DIR replicas=2`."""

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
from bateleur.runner.replicas.config import NOT_OF_RAY, OF_RAY, ReplicaConfig
from bateleur.runner.replicas.engine_replica import EngineReplica, open_engine
from bateleur.runner.replicas.forwarded_request import ForwardedRequest
from bateleur.runner.replicas.frontend import ReplicaFrontend
from bateleur.runner.serve.config import ServeConfig, served_engine
from bateleur.runner.utils.arguments import Integer, refuse
from bateleur.runner.utils.options import Option, options_of

_ROUTER = "bateleur.runner.replicas.ray_router.PrefixRouter"
_REPLICAS_PER_FRONTEND = 16
_SHUTDOWN_MARGIN = 5  # seconds in addition to the server's shutdown timeout, before Ray kills a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """All options of an application: of the engines, the server and the replicas."""

    engine: Mapping[str, Any] = field(default_factory=dict)  # options of `LLM`
    server: ServeConfig = field(default_factory=ServeConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    num_threads: int | None = None  # CPU threads per replica and rank; None is Ray's default, 1

    @property
    def max_num_seqs(self) -> int:
        """Number of concurrent requests of a replica; 64 if the engine chooses it when it starts."""
        return int(self.engine.get("max_num_seqs") or 64)

    def resources(self, num_gpus: float) -> dict[str, float]:
        """Return the Ray resources of a replica with all its ranks. num_gpus: GPUs of the cluster, for device auto."""
        device = str(self.engine.get("device", "auto"))
        ranks = math.prod(int(self.engine.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "data"))
        if device.startswith("cuda") or (device == "auto" and num_gpus > 0):
            return {"CPU": float(self.num_threads or 1), "GPU": float(ranks)}
        return {"CPU": float(ranks * (self.num_threads or 1))}

    @property
    def num_cpus(self) -> int:
        """Number of CPUs to declare for a new local Ray: all cores, but at least one CPU more than all replicas need.

        It may exceed the number of cores, so that Ray can place all replicas.
        """
        return max(os.cpu_count() or 1, int(self.replicas.upper_limit * self.resources(0)["CPU"]) + 1)


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application from options of `LLM`, `bateleur serve` and `ReplicaConfig` by name, for `serve run`.

    Values may be strings. Raises ValueError for unknown names and invalid values.
    """
    given = dict(args)
    for name in (*NOT_OF_RAY, *OF_RAY):
        if name in given:
            refuse(name, given[name], "left out: use the options of Ray Serve, which listens")
    threads = given.pop("num_threads", None)
    if threads is not None:
        threads = Integer(1)("num_threads", int(threads) if str(threads).isdecimal() else threads)
    server = ServeConfig(**_taken(given, options_of(ServeConfig)))
    replicas = ReplicaConfig(**_taken(given, options_of(ReplicaConfig)))
    engine = served_engine(_taken(given, all_options()) | given)
    if EngineConfig.of(**engine).lora.enable_lora:
        refuse("enable_lora", True, "false with replicas, which do not load adapters together")
    if server.lora_modules:
        refuse("lora_modules", server.lora_modules, "left out without enable_lora")
    return build_application(DeploymentPlan(engine=engine, server=server, replicas=replicas, num_threads=threads))


def build_application(plan: DeploymentPlan) -> serve.Application:
    """Build the Ray Serve application with its two deployments: frontends, and engine replicas."""
    replicas, server = plan.replicas, plan.server
    resources = plan.resources(ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0)
    num_gpus, placement = resources.get("GPU", 0.0), dict[str, Any]()
    if num_gpus > 1:  # one resource bundle for all ranks, which are child processes on its node
        placement = {"placement_group_bundles": [resources], "placement_group_strategy": "STRICT_PACK"}
    seconds = server.shutdown_timeout + _SHUTDOWN_MARGIN
    shutdown = {"graceful_shutdown_timeout_s": seconds, "graceful_shutdown_wait_loop_s": 0.2}
    scaling: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.upper_limit > replicas.replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas.replicas,
                "max_replicas": replicas.upper_limit,
                "target_ongoing_requests": replicas.target_ongoing_requests or plan.max_num_seqs,
                "upscale_delay_s": replicas.upscale_delay,
                "downscale_delay_s": replicas.downscale_delay,
            }
        }
    options = {"imbalance": replicas.replica_imbalance, "slack": replicas.replica_slack}
    engines = serve.deployment(
        _EngineDeployment,
        name="engine",
        **scaling,
        **shutdown,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": num_gpus},
        **placement,
        max_ongoing_requests=2 * plan.max_num_seqs + _REPLICAS_PER_FRONTEND,
        max_queued_requests=max(server.max_queued_requests, _REPLICAS_PER_FRONTEND),  # some for requests being sent
        health_check_period_s=2,
        health_check_timeout_s=replicas.health_check_timeout,
        request_router_config={"request_router_class": _ROUTER, "request_router_kwargs": options},
    )
    frontends = serve.deployment(
        serve.ingress()(_FrontendDeployment),
        name="front",
        **shutdown,
        num_replicas=1 + (replicas.upper_limit - 1) // _REPLICAS_PER_FRONTEND,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
    )
    internal = replace(server, api_key=(), allowed_origins=(), uds=None)
    return frontends.bind(engines.bind(plan.engine, internal, plan.num_threads), server)


class _EngineDeployment(EngineReplica):
    """An `EngineReplica` that creates its engine, inside a Ray actor."""

    def __init__(self, engine: Mapping[str, Any], config: ServeConfig, num_threads: int | None) -> None:
        llm = open_engine(engine, num_threads, config.max_queued_requests)
        llm.llm.prepare_structured_outputs()
        super().__init__(serve.get_replica_context().replica_tag, llm, config)

    async def __del__(self) -> None:
        await self.close()


class _FrontendDeployment(ReplicaFrontend):
    """A `ReplicaFrontend` that sends requests through Ray Serve, inside a Ray actor."""

    def __init__(self, engines: serve.handle.DeploymentHandle, config: ServeConfig) -> None:
        super().__init__(self._send_to_engine, self._metrics_of_engines, config)
        self._engines = engines

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.app()

    async def _send_to_engine(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        answers = self._engines.options(stream=True).answer.remote(request)
        try:
            async for messages in answers:
                yield messages
        except RayActorError as error:
            raise ReplicaLost(str(error)) from error
        except BackPressureError as error:
            raise QueueFull("all replicas are busy and the queue is full (--max-queued-requests)") from error
        except DeploymentUnavailableError as error:
            raise EngineDead(str(error)) from error
        finally:
            with suppress(Exception):
                answers.cancel()

    async def _metrics_of_engines(self) -> dict[str, str]:
        return dict(await self._engines.broadcast("metrics").results_async(timeout_s=10))


def _taken(given: dict[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Remove these options from the arguments `given` and return them.

    Text given for an option that is not of type str is parsed if it is JSON.
    """
    taken = {each.name: given.pop(each.name) for each in options if each.name in given}
    for each in options:
        if isinstance(value := taken.get(each.name), str) and not each.type.startswith("str"):
            try:
                taken[each.name] = json.loads(value)
            except json.JSONDecodeError:
                taken[each.name] = [value] if each.type.startswith("Sequence[str]") else value
    return taken
