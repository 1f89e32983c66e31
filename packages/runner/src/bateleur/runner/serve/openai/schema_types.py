"""Standard names of JSON Schema types. Tools often use Python's names instead."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "string": "string str text char varchar enum",
    "integer": "integer int long short int8 int16 int32 int64 uint uint8 uint16 uint32 uint64",
    "number": "number num float double decimal float16 float32 float64",
    "boolean": "boolean bool",
    "object": "object dict map mapping struct",
    "array": "array arr list tuple sequence set",
    "null": "null none nonetype",
}
_STANDARD = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Schema fields that hold values, not schemas."""


def standard_type(name: object) -> str | None:
    """Return JSON Schema's name of a type, such as array for `list[str]`; None if `name` is not a type."""
    return _STANDARD.get(name.partition("[")[0].strip().lower()) if isinstance(name, str) else None


def standard_types(schema: Any) -> Any:
    """Return the schema with standard type names."""
    if isinstance(schema, list):
        return [standard_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: each if key in _VALUES else standard_types(each) for key, each in schema.items()}
    given = schema.get("type")
    if isinstance(given, str):
        found["type"] = standard_type(given) or given
    elif isinstance(given, list):
        found["type"] = [standard_type(each) or each for each in given]
    return found
