"""Middleware: API keys, CORS, and rejection of requests while the server stops."""

from collections.abc import Callable, Sequence
from hmac import compare_digest

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import add_handlers, http_error, response_of


def add_middleware(app: FastAPI, config: ServeConfig, is_stopping: Callable[[], bool]) -> None:
    """Add error handlers, access checks and CORS to an app."""
    add_handlers(app)
    app.add_middleware(AccessMiddleware, api_keys=config.api_key, is_stopping=is_stopping)
    if origins := list(config.allowed_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


class AccessMiddleware:
    """Requires an API key for `/v1`, and rejects new requests while the server stops."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], is_stopping: Callable[[], bool]) -> None:
        self._app, self._is_stopping = app, is_stopping
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it to the app. ASGI interface."""
        answer = None
        if scope["type"] == "http":
            # A target may be a URL (RFC 9112, 3.2.2).
            scheme, _, rest = scope["path"].partition("://")
            path = "/" + rest.partition("/")[2] if scheme in ("http", "https") else scope["path"]
            scope["path"] = path.rstrip("/") or "/"
            answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith("/v1") and self._keys and scope["method"] != "OPTIONS" and not self._has_valid_key(scope):
            message = "incorrect API key provided: Authorization (Bearer) or x-api-key must be a key of --api-key"
            error = http_error(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        elif self._is_stopping() and scope["method"] == "POST":
            message = "the server is stopping and accepts no more requests"
            error = http_error(503, message, code="stopping", headers={"Retry-After": "1"})
        else:
            return None
        return response_of(error, path)

    def _has_valid_key(self, scope: Scope) -> bool:
        """Return whether the request has a valid API key. Every key is compared in constant time."""
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")  # Anthropic's clients send this header
        token = given.strip().encode("utf-8", "surrogateescape")
        found = [compare_digest(token, key) for key in self._keys]
        return any(found)
