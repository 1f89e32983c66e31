"""`bateleur serve --replicas N`: runs the application on a new local Ray, or on an existing cluster."""

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
from bateleur.runner.utils.arguments import refuse

_NAME = "bateleur"
_OBJECT_STORE_BYTES = 80 * 2**20  # shared memory of a local Ray, for requests and responses
_PROXY_SECONDS = "60"
"""Seconds in which the HTTP proxy of a local Ray must start. Ray's default of 5 is too short on a busy machine."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ray_cluster(address: str | None, num_cpus: int) -> Iterator[None]:
    """For the `with` block, connect to the Ray cluster at `address`, or start one if `address` is None.

    num_cpus: number of CPUs that a started cluster declares.
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
def _handling(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set the handler of SIGINT and SIGTERM in the `with` block, if this is the main thread. Python allows no other."""
    main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, receive) for each in _SIGNALS if main}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _interruptible() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Raise KeyboardInterrupt at the first signal in the `with` block. A second signal ends the process.

    Yields a function that calls its argument and then waits for a signal. A signal during the wait raises nothing: the
    function returns.
    """
    waits, received = False, threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        if waits:
            received.set()
            return
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    def wait(ready: Callable[[], None]) -> None:
        nonlocal waits
        waits = True
        ready()
        received.wait()
        waits = False

    with _handling(receive):
        yield wait


def _start_local_ray(options: dict[str, Any]) -> None:
    """Start a local Ray, with up to 3 attempts: its processes time out after 15 seconds on a busy machine.

    An interrupt waits until Ray has started, because only then Ray can be shut down. A second interrupt ends this
    process at once. Ray's agents then end by themselves within a minute.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for last in (False, False, True):
        try:
            with _handling(receive):
                ray.init("local", **options)
        except Exception as error:  # Ray raises no narrower class
            if not received:
                ray.shutdown()
                if last:
                    raise ValueError(f"Ray did not start: {error}") from error
                continue
        if received:
            raise KeyboardInterrupt
        return


def run(plan: DeploymentPlan, port: int, ready: Callable[[], None]) -> None:
    """Serve at this port until a signal arrives, then finish running requests. ready: called when the server answers.

    Raises ValueError if the replicas cannot be started, and KeyboardInterrupt for a signal before that.
    """
    address, config = plan.replicas.ray_address, plan.server
    tls = {name: getattr(config, name) for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")}
    with ray_cluster(address, plan.num_cpus), _interruptible() as wait:
        serve.start(
            proxy_location="HeadOnly" if address is None else "EveryNode",
            http_options={
                "host": config.host,
                "port": port,
                "root_path": config.root_path,
                "keep_alive_timeout_s": config.timeout_keep_alive,
                **{name: path and str(path) for name, path in tls.items()},
            },
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        if address is not None:
            _check_free(address, config.host, port)
        try:
            try:
                frontends = serve.run(build_application(plan), name=_NAME)
            except RuntimeError as error:
                raise ValueError(f"the replicas did not start: {error}") from error
            wait(ready)
            frontends.broadcast("drain", config.shutdown_timeout).results()
            serve.delete(_NAME)
        except BaseException:
            if address is not None:
                serve.delete(_NAME, _blocking=False)  # a local Ray is shut down as a whole
            raise
        if address is None:
            serve.shutdown()


def _check_free(address: str, host: str, port: int) -> None:
    """Raise ValueError if Ray Serve at `address` has another host or port, or already runs bateleur's application."""
    listens = serve.context._get_global_client().http_config
    if (listens.host, listens.port) != (host, port):
        refuse("port", f"{host}:{port}", f"{listens.host}:{listens.port}, the address of Ray Serve at {address}")
    if _NAME in serve.status().applications:
        refuse("ray_address", address, f"a cluster without a Ray Serve application {_NAME!r}")
