"""Parsing of `tools` and `tool_choice`. Tools often use Python's names of JSON Schema types."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from bateleur.runner.text.messages import checked_tool, checked_tools
from bateleur.runner.utils.arguments import mapping, refuse, shown, text
from bateleur.runner.utils.log_once import log_once

_log = logging.getLogger(__name__)
_TYPE_NAMES = {
    "string": "string str text char varchar enum",
    "integer": "integer int long short int8 int16 int32 int64 uint uint8 uint16 uint32 uint64",
    "number": "number num float double decimal float16 float32 float64",
    "boolean": "boolean bool",
    "object": "object dict map mapping struct",
    "array": "array arr list tuple sequence set",
    "null": "null none nonetype",
}
_STANDARD = {name: kind for kind, names in _TYPE_NAMES.items() for name in names.split()}
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Schema fields that hold values, not schemas."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool choice that forces a call of the tool with this name."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""No calls; the model decides; at least one call; a call of one tool."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""List of {"type": "function", "function": {"name": ..., "parameters": ...}}."""


def tools(value: Any, *, strict: bool = False) -> tuple[dict[str, Any], ...]:
    """Return the function tools, with unique names. Raises ValueError with the position of an invalid tool.

    Duplicates, and tools that run on their vendor's servers, are ignored and logged, or rejected if `strict`.
    """
    if not isinstance(value, list | tuple):
        return tuple(checked_tools(value) or ())
    functions: dict[str, dict[str, Any]] = {}
    for i, each in enumerate(value):
        kind = each.get("type") if isinstance(each, Mapping) else "function"
        if kind != "function" and isinstance(kind, str) and not strict:
            log_once(_log, f"tools of type {shown(kind)} are ignored: this server does not run tools")
            continue
        checked = checked_tool(f"tools[{i}]", each)
        called = checked["function"]["name"]
        if called in functions and strict:
            refuse(f"tools[{i}].function.name", called, "another: an earlier tool has this name")
        if functions.setdefault(called, checked) is not checked:
            log_once(_log, f"several tools have the name {shown(called)}; the first one is used")
    return tuple(functions.values())


def tool_choice(value: Any, tools: Tools) -> ToolChoice:
    """Parse `tool_choice`. The default is auto with tools and none without."""
    if value is None or (value == "auto" and not tools):
        return "auto" if tools else "none"
    if value == "none":
        return "none"
    if isinstance(value, dict) and value.get("type") == "function":
        called = text("tool_choice.function.name", mapping("tool_choice.function", value.get("function")).get("name"))
        names = [each["function"]["name"] for each in tools]
        if called not in names:
            refuse("tool_choice.function.name", called, f"one of the tools: {shown(names)}")
        return NamedTool(called)
    if value not in ("auto", "required"):
        refuse("tool_choice", value, "none, auto, required, or {type: function, function: {name: ...}}")
    if not tools:
        refuse("tool_choice", value, "absent without tools")
    return "auto" if value == "auto" else "required"


def allowed_tools(choice: Any, tools: tuple[dict[str, Any], ...]) -> tuple[Any, tuple[dict[str, Any], ...]]:
    """Return the mode and tools in a choice of type allowed_tools. Another choice is returned with all tools."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, tools
    name = "tool_choice.allowed_tools"
    allowed = mapping(name, choice.get("allowed_tools"))
    given = allowed.get("tools") or []
    if not isinstance(given, list):
        refuse(f"{name}.tools", given, "a list of tools")
    functions = [mapping(f"{name}.tools", each).get("function") for each in given]
    names = [mapping(f"{name}.tools.function", each).get("name") for each in functions]
    return allowed.get("mode", "auto"), tuple(each for each in tools if each["function"]["name"] in names)


def forced_schema(choice: ToolChoice, tools: Tools, *, parallel: bool) -> dict[str, Any] | None:
    """Return the schema of forced arguments or, for choice required, of a list of calls; None if no call is forced.

    parallel: allow more than one call.
    """
    functions = [each["function"] for each in tools]
    if isinstance(choice, NamedTool):
        return next(_arguments(each) for each in functions if each["name"] == choice.name)
    if choice != "required":
        return None
    try:
        calls = [_call_schema(each, i) for i, each in enumerate(functions)]
    except RecursionError as error:
        raise ValueError("tools is nested too deeply to force a call; use tool_choice auto") from error
    return {"type": "array", "minItems": 1, **({} if parallel else {"maxItems": 1}), "items": {"anyOf": calls}}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Return whether calls of a tool must follow its schema."""
    return tool["function"].get("strict") is True


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments for tool_choice auto: any object unless the tool is strict."""
    return _arguments(tool["function"]) if is_strict(tool) else {"type": "object"}


def _call_schema(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    arguments = _moved(_arguments(function), f"#/items/anyOf/{i}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; without `parameters` it has no arguments."""
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **standard_types(parameters)}


def _moved(schema: Any, prefix: str) -> Any:
    """Return the schema for use at the JSON pointer `prefix` of another schema: its local references are adjusted."""
    if isinstance(schema, list):
        return [_moved(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(each, prefix) for key, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = prefix + reference[1:]
    return moved


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
