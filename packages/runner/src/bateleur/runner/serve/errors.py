"""Errors as HTTP statuses and bodies in OpenAI's and Anthropic's formats."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from bateleur.runner.errors import AdaptersBusy, ContextLengthExceeded, EngineDead, QueueFull
from bateleur.runner.serve.json_text import JSONText
from bateleur.runner.serve.openai.replies import error_body

CLIENT_GONE = 499
"""Status in the log for a client that disconnected."""
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def http_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> HTTPException:
    """Create an exception with a body in OpenAI's format. param: the invalid field. code: OpenAI's error code."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return HTTPException(status, error_body(message, kind=kind, param=param, code=code), headers)


_ANTHROPIC_KINDS = _KINDS | {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


@contextmanager
def http_errors(names: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Turn QueueFull, AdaptersBusy, EngineDead and ValueError into HTTPException.

    names: maps fields of chat completions to their names in the client's API, such as stop: stop_sequences. A field's
    name at the start of an error message is replaced.
    """
    try:
        yield
    except (QueueFull, AdaptersBusy) as error:
        message = f"rate limit exceeded: {error}" if isinstance(error, QueueFull) else str(error)
        raise http_error(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"}) from error
    except EngineDead as error:
        raise engine_dead_error(error) from error
    except ValueError as error:
        message = _renamed(str(error), names)
        raise http_error(400, message, param=_field_of(message), code=_code_of(error)) from error


def engine_dead_error(error: EngineDead) -> HTTPException:
    """Create the error for a dead engine or a stopping server."""
    return http_error(503, str(error), code="engine_dead")


def _code_of(error: ValueError) -> str | None:
    if isinstance(error, ContextLengthExceeded):
        return "context_length_exceeded"
    if "no such field is known here" in str(error):
        return "unknown_parameter"
    return "missing_required_parameter" if re.match(r"\w+ is absent;", str(error)) else None


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """Replace the field's name at the start of the message by the API's name in `names`, if it has one.

    The index in `messages[2]` is dropped, because it counts chat messages, not the items of the body before conversion.
    """
    found = re.match(r"(\w+)(\[\d+\])?", message)
    if found is None or found[1] not in names:
        return message
    return names[found[1]] + message[found.end() if found[1] == "messages" else found.end(1) :]


def _field_of(message: str) -> str | None:
    """Return the name of the body's field with which the message begins; None if there is none."""
    found = re.match(r"(?:(?:a key|keys) of )?(\w+)[\w.\[\]'\"]* (?:is|are|has|holds|must)\b", message)
    return found[1] if found else None


def response_of(error: AnyHTTPException, path: str) -> Response:
    """Return the response for an error: in Anthropic's format under /v1/messages, else in OpenAI's."""
    return JSONText(detail_of(error, path), error.status_code, error.headers)


def detail_of(error: AnyHTTPException, path: str) -> dict[str, Any]:
    """Return the JSON body for an error, in the format of the API (OpenAI or Anthropic) that `path` belongs to."""
    return anthropic_error(error) if "/v1/messages" in path else {"error": error_of(error)}


def error_of(error: AnyHTTPException) -> dict[str, Any]:
    """Return `message`, `type`, `param` and `code` of an error."""
    body: Any = error.detail
    if not isinstance(body, dict):
        body = http_error(error.status_code, str(body)).detail
    inner: dict[str, Any] = body["error"]
    return inner


def anthropic_error(error: AnyHTTPException) -> dict[str, Any]:
    """Return an error in Anthropic's format, which is also the last event of a failed stream."""
    body, status = error_of(error), error.status_code
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    # Claude Code compacts a conversation when it reads this phrase.
    too_long = "prompt is too long: " if body["code"] == "context_length_exceeded" else ""
    inner: dict[str, Any] = {"type": kind, "message": f"{too_long}{body['message']}"}
    if body["code"] == "thread_unsupported_request":  # clients then retry without threads
        inner["details"] = {"error_code": body["code"], "unsupported": [body["param"]]}
    return {"type": "error", "error": inner}


def add_handlers(app: FastAPI) -> None:
    """Register handlers that answer every error of the app with a body as in OpenAI's or Anthropic's API."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, AnyHTTPException)
        if error.status_code in (404, 405) and not isinstance(error.detail, dict):
            found = {404: "this path does not exist", 405: "this path does not support the method"}[error.status_code]
            where = f"{request.method} {request.url.path[:100]}"
            error = http_error(error.status_code, f"{found}: {where}", headers=error.headers)
        return response_of(error, request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def unknown(request: Request, error: Exception) -> Response:
        message = f"an error inside the server: {type(error).__name__}"
        return response_of(http_error(500, message), request.url.path)

    app.add_exception_handler(AnyHTTPException, known)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unknown)
