"""Checks of `quantization_config` fields, and matching of module names by the rules of each tool."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from bateleur.runner.utils.arguments import Integer, refuse


def strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the strings of a list field, those of nested lists included; () if the field is absent."""
    value = fields.get(name)
    if value is None:
        return ()
    entries: list[Any] = value if isinstance(value, list) else [None]
    flat: list[Any] = [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(each, str) for each in flat):
        refuse(f"quantization_config: {name}", value, "a list of names of modules")
    return tuple(flat)


def objects(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that is a JSON object; empty if the field is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(f"quantization_config: {name}", value, "an object")
    return dict(value or {})


def each_object(fields: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return a field that is a JSON object of objects. A null stands for an empty object."""
    found = objects(fields, name)
    return {key: objects({f"{name}[{key!r}]": value}, f"{name}[{key!r}]") for key, value in found.items()}


def integer(fields: Mapping[str, Any], name: str, default: int) -> int:
    """Return an integer field; `default` if it is absent."""
    value = fields.get(name)
    return default if value is None else Integer()(f"quantization_config: {name}", value)


def pair(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block from a field like [128, 128] or `128x128`; None if the field is absent."""
    value = fields.get(name)
    if value is None:
        return None
    sizes = [int(each) if each.isdecimal() else each for each in value.split("x")] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(each) is not int or each < 1 for each in sizes):
        refuse(f"quantization_config: {name}", value, "two positive integers")
    return sizes[0], sizes[1]


def starts_with(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a regular expression matches one of the names from its start, as `re.match`."""
    return any(map(_compiled(pattern).match, names))


def occurs(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a regular expression matches a part of a name, as `re.search`."""
    return any(map(_compiled(pattern).search, names))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"quantization_config: {pattern!r} is no regular expression: {error}") from error


def listed(entry: str, names: tuple[str, ...]) -> bool:
    """Return whether `entry` of a module list is one of a module's `names`, or `re:` and a pattern for their start."""
    return starts_with(entry[3:], names) if entry.startswith("re:") else entry in names


def contains(entry: str, names: tuple[str, ...]) -> bool:
    """Return whether `entry` of a module list, as in AWQ, is a part of one of a module's `names`."""
    return any(entry in name for name in names)


def wildcard(entry: str, names: tuple[str, ...]) -> bool:
    """Return whether `entry` of a module list, a shell pattern (modelopt), matches one of a module's whole `names`."""
    return any(fnmatchcase(name, entry) for name in names)


def ends_with(entry: str, names: tuple[str, ...]) -> bool:
    """Return whether one of a module's `names` equals `entry`, continues it with a dot, or ends with it, as for FP8."""
    return any(name == entry or name.startswith(f"{entry}.") or name.endswith(entry) for name in names)
