"""A request as it goes to a replica, and what comes back: plain data, which any process can read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from starlette.types import Message, Scope

from bateleur.runner.replicas.prefix_keys import PATHS, prefix_keys
from bateleur.runner.serve.json_text import loads

_TOLD = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
)
_SPEC = {"version": "3.0", "spec_version": "2.3"}
"""Of ASGI."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request over HTTP, read to its end."""

    scope: dict[str, Any]
    """What ASGI calls so, as far as it is data."""
    body: bytes
    prefixes: tuple[bytes, ...]
    """Keys of the prefixes of its prompt."""
    avoided: frozenset[str] = frozenset()
    """Replicas that could not answer it."""

    def avoiding(self, replica: str) -> Call:
        """The same for another replica than this one."""
        return replace(self, avoided=self.avoided | {replica})


Ask: TypeAlias = Callable[[Call], AsyncGenerator[list[Message], None]]
"""Has a call answered: what an ASGI application sends, some messages at a time. Raises ReplicaLost where the replica is
gone before the last of them, QueueFull, EngineDead."""


def call_of(scope: Scope, body: bytes) -> Call:
    """The call that a request makes. A body that can't be read has no prefixes; what is wrong, its reader says."""
    told = {name: scope[name] for name in _TOLD if name in scope}
    told["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    told["client"], told["server"] = _place(scope.get("client")), _place(scope.get("server"))
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    prefixes: tuple[bytes, ...] = ()
    if body and path.endswith(PATHS):
        try:
            value = loads(body)
        except ValueError:
            value = None
        prefixes = prefix_keys(path, value) if isinstance(value, dict) else ()
    return Call(told | {"asgi": _SPEC}, body, prefixes)


def _place(address: Any) -> tuple[str, int] | None:
    return None if address is None else (str(address[0]), int(address[1] or 0))
