"""The fields of a request body: which are known, which mean nothing here, and what kind of value each has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bateleur.runner.arguments import Check, Integer, flag, listed, refuse, text
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.vllm_names import SAMPLING

IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]
)
"""Fields that say nothing about the text: taken, whatever they hold."""
_NOT_OF_A_BODY = frozenset(("output_kind", "detokenize", "return_tags"))
"""Parameters that decide in which form the engine reports, which is up to whoever answers the body."""

_PRIORITY = Integer(-(1 << 31), (1 << 31) - 1)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "an object")
    return dict(value)


def _name(name: str, value: Any) -> str:
    """Short, since it stands in every part of a reply."""
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        refuse(name, value, "1 to 200 printable characters")
    return value


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    options = mapping(name, value)
    known = ("include_usage", "continuous_usage_stats")
    if unknown := options.keys() - {*known}:
        raise ValueError(f"{name} has {listed(unknown)}; the known ones are {', '.join(known)}")
    return {key: flag(f"{name}.{key}", each) for key, each in options.items()}


COMMON: dict[str, Check] = {
    "model": text,
    "request_id": _name,
    "priority": _PRIORITY,
    "stream": flag,
    "stream_options": _stream_options,
    "return_token_ids": flag,
}
"""What bodies of every kind may hold beside sampling parameters."""


def split(body: Mapping[str, Any], checks: Mapping[str, Check]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that `checks` knows, checked, and those for `SamplingParams`, as they are.

    A field that holds null counts as absent. Raises ValueError for an unknown one, by name, and for a wrong value.
    """
    given = {name: value for name, value in mapping("the body", body).items() if value is not None}
    sampling = ({*SamplingParams.names(), *SAMPLING} - _NOT_OF_A_BODY) - checks.keys()
    if unknown := given.keys() - checks.keys() - sampling - IGNORED:
        raise ValueError(f"{listed(unknown)}: no such field is known here")
    own = {name: check(name, given[name]) for name, check in checks.items() if name in given}
    if "stream_options" in own and not own.get("stream"):
        refuse("stream_options", given["stream_options"], "absent unless stream is true")
    return own, {name: value for name, value in given.items() if name in sampling}


def response_format(name: str, value: Any) -> dict[str, Any] | None:
    """What a `response_format` asks of the text, in the words of `structured_outputs`; None for plain text."""
    fields = mapping(name, value)
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            inner = mapping(f"{name}.json_schema", fields.get("json_schema"))
            if "schema" not in inner:
                raise ValueError(f"{name}.json_schema has no schema")
            return {"json": mapping(f"{name}.json_schema.schema", inner["schema"])}
        case "structural_tag":
            return {"structural_tag": fields}
    refuse(f"{name}.type", fields.get("type"), "one of text, json_object, json_schema, structural_tag")
