"""The body of a request: bounded in bytes and in time, and strict JSON."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ValidationError

from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import refusal, refusing
from bateleur.runner.serve.json_text import loads
from bateleur.runner.serve.openai.fields import whole
from bateleur.runner.utils.arguments import shown

Model = TypeVar("Model", bound=BaseModel)
Whole: TypeAlias = Annotated[int, BeforeValidator(whole)]
"""An integer, which may be written as 1.0."""
_CLOSE = {"Connection": "close"}
"""What comes of such a body is not waited for."""
_PATIENCE = 4
"""A body of up to so many times the limit is read and dropped: many a client reads an answer only when all is sent."""


async def read_object(request: Request, config: ServeConfig) -> dict[str, Any]:
    """The JSON object that a request holds. HTTPException for any other, for one too long, and for one too late."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"Content-Type is {kind!r}; it must be application/json" if kind else "Content-Type is absent"
        raise refusal(415, said, headers=_CLOSE)
    data = await read_bytes(request, config)
    with refusing():
        value = loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"the body is {_called(value)}; it must be an object")
    return value


def validated(model: type[Model], body: dict[str, Any]) -> Model:
    """The body as a model. Raises ValueError that names the first field with a wrong value."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"][:1]))
        if first["type"] == "missing":
            raise ValueError(f"{name} is absent; it is required") from error
        rule = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ValueError(f"{name} is {shown(body.get(name))}; it must be {rule}") from error


async def read_bytes(request: Request, config: ServeConfig) -> bytes:
    """The body. HTTPException for one too long, and for one too late."""
    try:
        async with asyncio.timeout(config.timeout_read):
            return await _read(request, config.max_body_bytes)
    except TimeoutError as error:
        said = f"the body has not come within {config.timeout_read:g} seconds"
        raise refusal(408, said, headers=_CLOSE) from error


async def _read(request: Request, most: int) -> bytes:
    """The bytes, counted as they come: a head may say less, or nothing."""
    said = request.headers.get("content-length", "")
    body, count = bytearray(), int(said[:20]) if said.isdigit() else 0
    if count <= _PATIENCE * most:
        count = 0
        async for part in request.stream():
            count += len(part)
            if count <= most:
                body += part
            elif count > _PATIENCE * most:
                break
        if count <= most:
            return bytes(body)
    raise refusal(413, f"the body has more than max_body_bytes = {most} bytes", headers=_CLOSE)


def _called(value: object) -> str:
    names = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
