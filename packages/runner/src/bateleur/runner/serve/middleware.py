"""Who is let in, before anything of a request is read."""

from __future__ import annotations

from hmac import compare_digest
from typing import Protocol

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import add_handlers, http_error, response_of


class ProtectedService(Protocol):
    """What stands behind a gate."""

    config: ServeConfig
    stopping: bool
    """Whether it is about to end, and lets nobody in."""


def add_middleware(app: FastAPI, service: ProtectedService) -> None:
    """Tell errors of an app in OpenAI's form, and let in whom the configuration says."""
    add_handlers(app)
    app.add_middleware(AccessMiddleware, service=service)
    if origins := list(service.config.allowed_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


class AccessMiddleware:
    """In front of the app: a key for `/v1`, and nobody new once the server is about to end."""

    def __init__(self, app: ASGIApp, service: ProtectedService) -> None:
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in place of the app, or let the app answer."""
        answer = None
        if scope["type"] == "http":
            scope["path"] = _path(scope["path"])
            answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (
            path.startswith("/v1")
            and self._keys
            and scope["method"] != "OPTIONS"
            and not self._has_valid_key(scope)
        ):
            return response_of(
                http_error(
                    401,
                    "incorrect API key provided: Authorization (Bearer) or x-api-key must be a key of --api-key",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                ),
                path,
            )
        if self._service.stopping and scope["method"] == "POST":
            said = "the server is about to end and takes no more requests"
            return response_of(http_error(503, said, code="stopping", headers={"Retry-After": "1"}), path)
        return None

    def _has_valid_key(self, scope: Scope) -> bool:
        """Compares with every key, each in constant time."""
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")  # of Anthropic's clients
        token = given.strip().encode("utf-8", "surrogateescape")
        found = [compare_digest(token, key) for key in self._keys]
        return any(found)


def _path(target: str) -> str:
    """The path of a target without a slash at its end. Proxies are asked for a whole address (RFC 9112, 3.2.2)."""
    scheme, _, rest = target.partition("://")
    path = "/" + rest.partition("/")[2] if scheme in ("http", "https") else target
    return path.rstrip("/") or "/"
