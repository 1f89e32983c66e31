"""Checks of `quantization_config` fields, and matching of module names as each tool does it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from bateleur.runner.utils.arguments import Integer, refuse


def strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The strings of a field that holds a list, or a list of lists; () if it is absent."""
    value = fields.get(name)
    if value is None:
        return ()
    entries: list[Any] = value if isinstance(value, list) else [None]
    flat: list[Any] = [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(each, str) for each in flat):
        refuse(f"quantization_config: {name}", value, "a list of names of modules")
    return tuple(flat)


def objects(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that holds an object; empty if it is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(f"quantization_config: {name}", value, "an object")
    return dict(value or {})


def each_object(fields: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """A field that holds an object of objects; null stands for an empty one."""
    found = objects(fields, name)
    return {key: objects({f"{name}[{key!r}]": value}, f"{name}[{key!r}]") for key, value in found.items()}


def integer(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A field that holds an integer; `default` if it is absent."""
    value = fields.get(name)
    return default if value is None else Integer()(f"quantization_config: {name}", value)


def pair(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """A field that holds rows and columns of a block, as a list or as `128x128`; None if it is absent."""
    value = fields.get(name)
    if value is None:
        return None
    sizes = [int(each) if each.isdecimal() else each for each in value.split("x")] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(each) is not int or each < 1 for each in sizes):
        refuse(f"quantization_config: {name}", value, "two positive integers")
    return sizes[0], sizes[1]


def starts_with(pattern: str, names: Iterable[str]) -> bool:
    """Whether a regular expression matches a name from its start, as `re.match`."""
    try:
        return any(re.match(pattern, name) for name in names)
    except re.error as error:
        raise ValueError(f"quantization_config: {pattern!r} is no regular expression: {error}") from error


def listed(entry: str, names: tuple[str, ...]) -> bool:
    """Match an entry as compressed-tensors does: `re:` and a regular expression, or the whole name."""
    return starts_with(entry[3:], names) if entry.startswith("re:") else entry in names


def wildcard(entry: str, names: tuple[str, ...]) -> bool:
    """Match an entry as modelopt does: a shell pattern for the whole name."""
    return any(fnmatchcase(name, entry) for name in names)


def ends_with(entry: str, names: tuple[str, ...]) -> bool:
    """Match an entry as transformers does for FP8 files: the whole name, its first parts, or its last characters."""
    return any(name == entry or name.startswith(f"{entry}.") or name.endswith(entry) for name in names)
