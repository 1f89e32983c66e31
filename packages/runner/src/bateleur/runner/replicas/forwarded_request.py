"""The HTTP request that the frontend forwards to a replica, as data that can be sent between processes."""

from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from starlette.types import Message, Scope

from bateleur.runner.replicas.prefix_routing import PATHS, prefix_keys
from bateleur.runner.serve.json_text import loads

_SCOPE_FIELDS = ["type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"]
_ASGI = {"version": "3.0", "spec_version": "2.3"}


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A complete HTTP request that is forwarded to a replica, and hashes of its prompt's prefixes for routing.

    excluded: replicas that died with this request, and must not get it again.
    """

    scope: dict[str, Any]  # the ASGI scope, without values that cannot be pickled
    body: bytes
    prefixes: tuple[bytes, ...]  # hashes of the prefixes of its prompt, see `prefix_keys`
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Self:
        """Convert an ASGI request. A body that is not JSON gets no prefix hashes; the replica reports the error."""
        fields = {name: scope[name] for name in _SCOPE_FIELDS if name in scope}
        fields["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        for name in ("client", "server"):
            address = scope.get(name)
            fields[name] = None if address is None else (str(address[0]), int(address[1] or 0))
        path, value = scope["path"].removeprefix(scope.get("root_path", "")), None
        with suppress(ValueError):
            value = loads(body) if body and path.endswith(PATHS) else None
        prefixes = prefix_keys(path, value) if isinstance(value, dict) else ()
        return cls(fields | {"asgi": _ASGI}, body, prefixes)

    def excluding(self, replica: str) -> Self:
        """Return the same request, which must not be sent to this replica again."""
        return replace(self, excluded=self.excluded | {replica})


SendRequest: TypeAlias = Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]
"""Sends a request to a replica and yields its ASGI messages, several at a time. Raises ReplicaLost if the replica dies
before the last message, QueueFull, or EngineDead."""
