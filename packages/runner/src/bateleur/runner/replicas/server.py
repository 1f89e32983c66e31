"""`bateleur serve --replicas N`: the application on a Ray that is started for it, or on one that is there."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray import serve

from bateleur.runner.replicas.application import Plan, application
from bateleur.runner.serve.config import ServeConfig

_NAME = "bateleur"
_OBJECTS_BYTES = 80 * 2**20
"""Shared memory of a Ray that is started here: what goes through it is requests and answers."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def started(address: str | None, num_cpus: int) -> Iterator[None]:
    """Connected to a Ray: that at an address, or one of this machine alone, which ends with the block.

    num_cpus: what its replicas may take; they share what cores there are.
    """
    from ray._private import ray_constants

    # Under `uv run` Ray would send the folder away and start its processes by `uv run` again; here they find
    # the same packages where they are.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        ray.init(address, **common)
    else:
        own = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECTS_BYTES}
        _start(own | common)
    try:
        yield
    finally:
        ray.shutdown()


def _start(options: dict[str, Any]) -> None:
    """A Ray of this machine. Its processes give each other 15 seconds to begin, which a busy machine may not do."""
    from ray._common.usage.usage_lib import set_usage_stats_enabled_via_env_var

    set_usage_stats_enabled_via_env_var(False)  # nobody was asked whether Ray may report home
    for last in (False, False, True):
        try:
            ray.init("local", **options)
            return
        except Exception as error:  # Ray raises just that
            ray.shutdown()
            if last:
                raise ValueError(f"Ray did not start: {error}") from error


def run(plan: Plan, port: int, ready: Callable[[], None]) -> None:
    """Answer at this port until a signal comes, and what runs has ended.

    ready: called when it answers. Raises ValueError if the replicas can't be started.
    """
    num_cpus = max(os.cpu_count() or 1, plan.replicas.most * (plan.num_threads or 1))
    with started(plan.replicas.ray_address, num_cpus), _signals() as told:
        serve.start(
            proxy_location="HeadOnly" if plan.replicas.ray_address is None else "EveryNode",
            http_options=_http_options(plan.server, port),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        try:
            front = _deployed(plan)
            ready()
            told.wait()
            front.broadcast("drain", plan.server.shutdown_timeout).results()
        finally:
            serve.delete(_NAME)
            if plan.replicas.ray_address is None:
                serve.shutdown()


def _deployed(plan: Plan) -> serve.handle.DeploymentHandle:
    try:
        return serve.run(application(plan), name=_NAME)
    except RuntimeError as error:
        raise ValueError(f"the replicas did not start: {error}") from error


def _http_options(config: ServeConfig, port: int) -> dict[str, Any]:
    return {
        "host": config.host,
        "port": port,
        "root_path": config.root_path,
        "keep_alive_timeout_s": config.timeout_keep_alive,
        "ssl_keyfile": _text(config.ssl_keyfile),
        "ssl_certfile": _text(config.ssl_certfile),
        "ssl_ca_certs": _text(config.ssl_ca_certs),
    }


def _text(path: object) -> str | None:
    return None if path is None else str(path)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set when a signal comes; a second one ends the process at once, and Ray with it."""
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        told.set()
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, tell) for each in _SIGNALS}
    try:
        yield told
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
