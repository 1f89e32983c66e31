"""The tools that a chat may call, and whether it may, or must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from bateleur.runner.arguments import refuse, shown, text
from bateleur.runner.openai.fields import mapping
from bateleur.runner.openai.schema_types import standard_types
from bateleur.runner.text.messages import checked_tools


@dataclass(frozen=True, slots=True)
class Named:
    """This very tool must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | Named
"""No call is looked for; the model decides; at least one call; that call."""


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""{"type": "function", "function": {"name": ..., "parameters": ...}}, each."""


def tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Check tools, each under a name of its own. Raises ValueError that names the place."""
    checked, seen = checked_tools(value) or [], set[str]()
    for i, each in enumerate(checked):
        called = each["function"]["name"]
        if called in seen:
            refuse(f"{name}[{i}].function.name", called, "another: a tool before has it")
        seen.add(called)
    return tuple(checked)


def tool_choice(value: Any, known: Tools) -> ToolChoice:
    """Read a `tool_choice` beside the tools that are known; silent means auto where there are any."""
    if value is None:
        return "auto" if known else "none"
    if value == "none":
        return "none"
    if isinstance(value, dict) and value.get("type") == "function":
        called = text(
            "tool_choice.function.name", mapping("tool_choice.function", value.get("function")).get("name")
        )
        names = [each["function"]["name"] for each in known]
        if called not in names:
            refuse("tool_choice.function.name", called, f"one of the tools: {shown(names)}")
        return Named(called)
    if value not in ("auto", "required"):
        refuse("tool_choice", value, "none, auto, required, or {type: function, function: {name: ...}}")
    if not known:
        refuse("tool_choice", value, "absent without tools")
    return "auto" if value == "auto" else "required"


def forced_schema(choice: ToolChoice, known: Tools, *, parallel: bool) -> dict[str, Any] | None:
    """What the text must be where a call is forced; None where none is.

    It is the arguments of the tool that is named; else a list of calls, of one where they may not be parallel.
    """
    functions = [each["function"] for each in known]
    if isinstance(choice, Named):
        return next(_arguments(each) for each in functions if each["name"] == choice.name)
    if choice != "required":
        return None
    try:
        calls = [_call_schema(each, i) for i, each in enumerate(functions)]
    except RecursionError as error:
        raise ValueError("tools is nested too deeply; a call of them can't be forced") from error
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether calls of a tool must follow its schema."""
    return tool["function"].get("strict") is True


def arguments_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of a call must be if the model decides: any object, unless the tool is strict."""
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
    """The schema of the arguments of a function. One without parameters takes no arguments."""
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **standard_types(parameters)}


def _moved(schema: Any, place: str) -> Any:
    """The schema as it reads at another place: references within it follow."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(each, place) for key, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
