"""Request bodies: limits on size and time, strict JSON, and their OpenAPI schemas."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ValidationError

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.config import ServeConfig
from bateleur.runner.serve.errors import http_error, http_errors
from bateleur.runner.serve.json_text import loads
from bateleur.runner.serve.openai.fields import Field, as_integer, sampling_names
from bateleur.runner.utils.arguments import shown
from bateleur.runner.utils.options import options_of

Model = TypeVar("Model", bound=BaseModel)
IntegerLike: TypeAlias = Annotated[int, BeforeValidator(as_integer)]
"""An integer; 1.0 is accepted."""
_CLOSE = {"Connection": "close"}
"""Close the connection instead of reading the rest of the body."""
_DRAIN_FACTOR = 4
"""Read and discard bodies up to this multiple of the limit: many clients read the reply only after sending all."""


async def read_json_object(request: Request, config: ServeConfig) -> dict[str, Any]:
    """Read the body as a JSON object. Raises HTTPException if it is anything else, too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type is {kind!r}; it must be application/json" if kind else "Content-Type is absent"
        raise http_error(415, message, headers=_CLOSE)
    data = await read_bytes(request, config)
    with http_errors():
        value = loads(data)
        if not isinstance(value, dict):
            names = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
            raise ValueError(f"the body is {names.get(type(value), 'a number')}; it must be an object")
    return value


async def read_model(request: Request, config: ServeConfig, model: type[Model]) -> Model:
    """Read the body, and validate it as JSON of this model. Raises HTTPException if it is invalid."""
    value = await read_json_object(request, config)
    with http_errors():
        return validate(model, value)


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """Validate the body. Raises ValueError that names the first invalid field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:  # pydantic does not read other fields then
            raise ValueError("the body has a field whose name is half of a surrogate pair") from error
        name = ".".join(map(str, first["loc"][:1]))
        if first["type"] == "missing":
            raise ValueError(f"{name} is absent; it is required") from error
        rule = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise ValueError(f"{name} is {shown(body.get(name))}; it must be {rule}") from error


async def read_bytes(request: Request, config: ServeConfig) -> bytes:
    """Read the body. Raises HTTPException if it is too long or too slow. Content-Length may be missing or too small."""
    max_bytes, length = config.max_body_bytes, request.headers.get("content-length", "")
    body, count = bytearray(), int(length[:20]) if length.isdigit() else 0
    if count <= _DRAIN_FACTOR * max_bytes:
        count = 0
        try:
            async with asyncio.timeout(config.timeout_read):
                async for part in request.stream():
                    count += len(part)
                    if count <= max_bytes:
                        body += part
                    elif count > _DRAIN_FACTOR * max_bytes:
                        break
        except TimeoutError as error:
            message = f"the body was not received within {config.timeout_read:g} seconds"
            raise http_error(408, message, headers=_CLOSE) from error
        if count <= max_bytes:
            return bytes(body)
    raise http_error(413, f"the body has more than max_body_bytes = {max_bytes} bytes", headers=_CLOSE)


_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "Mapping": "object"}
"""JSON type by the prefix of a sampling parameter's annotation. Other parameters accept several types."""


def openapi_body(fields: Mapping[str, Field], *required: str, sampled: bool = True) -> dict[str, Any]:
    """Build the OpenAPI entry of a body with these fields, and with the sampling parameters if `sampled`.

    required: names of the fields that a body must have.
    """
    described = {name: (field.about, field.kind) for name, field in fields.items()}
    for option in options_of(SamplingParams) if sampled else ():
        if option.name in sampling_names() and option.name not in fields:
            kind = next((json for name, json in _TYPES.items() if option.type.startswith(name)), None)
            described[option.name] = option.help, kind
    properties = {
        name: {"description": about, **({"type": kind} if kind else {})} for name, (about, kind) in described.items()
    }
    return _body({"type": "object", "properties": properties, "required": [*required]})


def openapi_model(model: type[BaseModel]) -> dict[str, Any]:
    """Build the OpenAPI entry of a body that pydantic validates."""
    return _body(model.model_json_schema())


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
