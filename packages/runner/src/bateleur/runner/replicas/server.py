"""`bateleur serve --replicas N`: the application on a Ray that is started for it, or on one that is there."""

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

from bateleur.runner.replicas.application import Plan, application
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.utils.arguments import refuse

_NAME = "bateleur"
_OBJECTS_BYTES = 80 * 2**20
"""Shared memory of a Ray that is started here: what goes through it is requests and answers."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def started(address: str | None, num_cpus: int) -> Iterator[None]:
    """Connected to a Ray: that at an address, or one of this machine alone, which ends with the block.

    num_cpus: what its replicas may take; they share what cores there are.
    """
    from ray._common.usage.usage_lib import set_usage_stats_enabled_via_env_var
    from ray._private import ray_constants
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    # Under `uv run` Ray would send the folder away and start its processes by `uv run` again; here they find
    # the same packages where they are.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    set_usage_stats_enabled_via_env_var(False)  # nobody was asked whether Ray may report home
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            _check_answers(address)
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray start` does there
            ray.init(address, **common)
        else:
            own = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECTS_BYTES}
            _start(own | common)
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """ValueError if nobody listens there, which takes Ray minutes to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", say
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            pass
    except (OSError, OverflowError) as error:
        refuse("ray_address", address, f"where a Ray cluster answers: {error}")


@contextmanager
def _held() -> Iterator[None]:
    """An interrupt waits for the end of the block: a Ray that has begun to start can only be ended when it has started.

    A second one is for good, and leaves Ray's agents to themselves, which takes them a minute.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        told.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {each: signal.signal(each, hold) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if told:
            raise KeyboardInterrupt


def _start(options: dict[str, Any]) -> None:
    """A Ray of this machine. Its processes give each other 15 seconds to begin, which a busy machine may not do."""
    for last in (False, False, True):
        try:
            with _held():
                ray.init("local", **options)
            return
        except Exception as error:  # Ray raises just that
            ray.shutdown()
            if last:
                raise ValueError(f"Ray did not start: {error}") from error


def run(plan: Plan, port: int, ready: Callable[[], None]) -> None:
    """Answer at this port until a signal comes, and what runs has ended.

    ready: called when it answers. Raises ValueError if the replicas can't be started, KeyboardInterrupt where a signal
    comes before they have, or a second one.
    """
    address = plan.replicas.ray_address
    with started(address, plan.cpus), _Signals() as told:
        serve.start(
            proxy_location="HeadOnly" if address is None else "EveryNode",
            http_options=_http_options(plan.server, port),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        if address is not None:
            _check_free(address, plan.server.host, port)
        try:
            front = _deployed(plan)
            told.wait(ready)
            front.broadcast("drain", plan.server.shutdown_timeout).results()
            serve.delete(_NAME)
        except BaseException:
            if address is not None:
                serve.delete(_NAME, _blocking=False)  # a Ray of its own goes as it is
            raise
        if address is None:
            serve.shutdown()


def _check_free(address: str, host: str, port: int) -> None:
    """ValueError if Ray Serve of a cluster listens elsewhere, or has an application of another server."""
    listens = serve.context._get_global_client().http_config
    if (listens.host, listens.port) != (host, port):
        refuse(
            "port", f"{host}:{port}", f"{listens.host}:{listens.port}, where Ray Serve of {address} listens"
        )
    if _NAME in serve.status().applications:
        refuse("ray_address", address, f"a cluster without an application {_NAME!r} of another server")


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


class _Signals:
    """Within the block a signal interrupts, unless `wait` waits for it; one behind that ends the process."""

    def __init__(self) -> None:
        self._waits = False
        self._told = threading.Event()

    def __enter__(self) -> _Signals:
        self._before = {each: signal.signal(each, self._tell) for each in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def wait(self, ready: Callable[[], None]) -> None:
        """Until a signal comes, which may be as soon as `ready` is called."""
        self._waits = True
        ready()
        self._told.wait()
        self._waits = False

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._told.set()
            return
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt
