"""Values that a model wrote without quotes, as JSON of the types that a schema wants."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_DEEPEST = 16
"""Schemas that lie in one another deeper than this say nothing."""
_TYPES: dict[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{dict: "object", list: "array", type(None): "null"},
}
_INTEGER = re.compile(r"[+-]?\d{1,400}(\.0*)?")


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that an object's schema allows for a key; text alone where it says nothing."""
    properties = schema.get("properties")
    found: set[str] = set()
    if isinstance(properties, Mapping):
        _collect(properties.get(key), schema, found, 0)
    return frozenset(found or {"string"})


def _collect(part: Any, root: Mapping[str, Any], found: set[str], depth: int) -> None:
    if not isinstance(part, Mapping) or depth > _DEEPEST:
        return
    told = part.get("type")
    for each in told if isinstance(told, list) else [told]:
        if isinstance(each, str) and each in _TYPES.values():
            found.add(each)
    for name in ("anyOf", "oneOf", "allOf"):
        for each in part[name] if isinstance(part.get(name), list) else ():
            _collect(each, root, found, depth + 1)
    if isinstance(part.get("enum"), list) and told is None:
        found.update(_TYPES[type(each)] for each in part["enum"] if type(each) in _TYPES)
    if "const" in part and type(part["const"]) in _TYPES:
        found.add(_TYPES[type(part["const"])])
    if part.get("nullable") is True:
        found.add("null")
    if isinstance(part.get("$ref"), str):
        _collect(_at(root, part["$ref"]), root, found, depth + 1)


def _at(root: Any, pointer: str) -> Any:
    """What a reference within the schema points at."""
    for step in pointer.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON of one of these types; as text if it is of none."""
    bare = text.strip()
    small = bare.lower()
    if small == "null" and ("null" in types or "string" not in types):
        return "null"
    if small in ("true", "false") and "boolean" in types:
        return small
    if "integer" in types and _INTEGER.fullmatch(bare):
        return str(int(bare.partition(".")[0]))
    read = _read(bare)
    if type(read) is float or type(read) is int:
        kind = "number"
    else:
        kind = _TYPES.get(type(read), "")
    if kind in types and kind in ("number", "object", "array"):
        return json.dumps(read, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _read(text: str) -> object:
    """None for what is no JSON; NaN and infinities are none."""
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value
