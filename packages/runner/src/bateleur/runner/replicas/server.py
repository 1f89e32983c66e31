"""`bateleur serve --replicas N`: runs the application on a new local Ray, or on an existing cluster."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray import serve

from bateleur.runner.replicas.application import DeploymentPlan, build_application
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.utils.arguments import refuse

_NAME = "bateleur"
_OBJECT_STORE_BYTES = 80 * 2**20
"""Shared memory of a local Ray, for requests and responses."""
_PROXY_SECONDS = "60"
"""Seconds in which the HTTP proxy of a local Ray must start. Ray's default of 5 is too short on a busy machine."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ray_cluster(address: str | None, num_cpus: int) -> Iterator[None]:
    """Connect to the Ray cluster at an address, or start a local one that ends with the `with` block.

    num_cpus: CPUs that a local Ray declares; may exceed the number of cores.
    """
    from ray._common.usage.usage_lib import set_usage_stats_enabled_via_env_var
    from ray._private import ray_constants
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    # Under `uv run` Ray would upload the working folder and start its processes by `uv run`. Local processes find the
    # same packages without that.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    set_usage_stats_enabled_via_env_var(False)  # no telemetry without the user's consent
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            _check_reachable(address)
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray start` does
            ray.init(address, **common)
        else:
            options = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            variables = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": _PROXY_SECONDS}  # read by Ray Serve's controller
            _start_local_ray({**options, "runtime_env": {"env_vars": variables}, **common})
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ValueError if nothing listens at the address. Ray itself would need minutes to report that."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # for example "auto"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            pass
    except (OSError, OverflowError) as error:
        refuse("ray_address", address, f"the address of a running Ray cluster: {error}")


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Delay an interrupt to the end of the `with` block, because Ray can only be shut down once it has started.

    A second interrupt ends this process at once. Ray's agents then end by themselves within a minute.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {each: signal.signal(each, receive) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if received:
            raise KeyboardInterrupt


def _start_local_ray(options: dict[str, Any]) -> None:
    """Start a local Ray, with up to 3 attempts: its processes time out after 15 seconds on a busy machine."""
    for last in (False, False, True):
        try:
            with _deferred_interrupt():
                ray.init("local", **options)
            return
        except Exception as error:  # Ray raises no narrower class
            ray.shutdown()
            if last:
                raise ValueError(f"Ray did not start: {error}") from error


def run(plan: DeploymentPlan, port: int, ready: Callable[[], None]) -> None:
    """Serve at this port until a signal arrives, then finish running requests.

    ready: called when the server answers. Raises ValueError if the replicas cannot be started, and KeyboardInterrupt
    for a signal before they have started.
    """
    address = plan.replicas.ray_address
    with ray_cluster(address, plan.num_cpus), _SignalHandler() as signals:
        serve.start(
            proxy_location="HeadOnly" if address is None else "EveryNode",
            http_options=_http_options(plan.server, port),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        if address is not None:
            _check_free(address, plan.server.host, port)
        try:
            frontends = _deploy(plan)
            signals.wait(ready)
            frontends.broadcast("drain", plan.server.shutdown_timeout).results()
            serve.delete(_NAME)
        except BaseException:
            if address is not None:
                serve.delete(_NAME, _blocking=False)  # a local Ray is shut down as a whole
            raise
        if address is None:
            serve.shutdown()


def _check_free(address: str, host: str, port: int) -> None:
    """Raise ValueError if the cluster's Ray Serve has another HTTP address, or already runs bateleur's application."""
    listens = serve.context._get_global_client().http_config
    if (listens.host, listens.port) != (host, port):
        refuse("port", f"{host}:{port}", f"{listens.host}:{listens.port}, the address of Ray Serve at {address}")
    if _NAME in serve.status().applications:
        refuse("ray_address", address, f"a cluster without a Ray Serve application {_NAME!r}")


def _deploy(plan: DeploymentPlan) -> serve.handle.DeploymentHandle:
    try:
        return serve.run(build_application(plan), name=_NAME)
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


class _SignalHandler:
    """Raises KeyboardInterrupt at the first signal, unless `wait` waits for it. A second signal ends the process."""

    def __init__(self) -> None:
        self._waits = False
        self._received = threading.Event()

    def __enter__(self) -> _SignalHandler:
        self._before = {each: signal.signal(each, self._receive) for each in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def wait(self, ready: Callable[[], None]) -> None:
        """Call `ready`, and wait for a signal."""
        self._waits = True
        ready()
        self._received.wait()
        self._waits = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._received.set()
            return
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt
