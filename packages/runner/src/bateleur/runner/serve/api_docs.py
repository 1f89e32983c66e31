"""What `/openapi.json` says of the bodies of requests: the fields that the server reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.fields import Field, sampling_names
from bateleur.runner.utils.options import options_of

_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "Mapping": "object"}
"""JSON types by what the annotation of a sampling parameter begins with; others are of several types."""


def described(fields: Mapping[str, Field], *required: str, sampled: bool = True) -> dict[str, Any]:
    """OpenAPI's part of a route whose body has these fields, and sampling parameters if `sampled`."""
    properties = {name: _property(field.about, field.kind) for name, field in fields.items()}
    for option in options_of(SamplingParams) if sampled else ():
        if option.name in sampling_names() and option.name not in fields:
            kind = next((json for name, json in _TYPES.items() if option.type.startswith(name)), None)
            properties[option.name] = _property(option.help, kind)
    return _body({"type": "object", "properties": properties, "required": [*required]})


def described_by(model: type[BaseModel]) -> dict[str, Any]:
    """The same of a model."""
    return _body(model.model_json_schema())


def _property(about: str, kind: str | None) -> dict[str, Any]:
    return {"description": about, **({"type": kind} if kind else {})}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
