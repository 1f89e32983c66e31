"""Names of modules in ignore lists, in the ways of the tools that write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any


def strings(fields: Any) -> tuple[str, ...]:
    """The strings of a list, or of a list of lists; () for None."""
    if fields is None:
        return ()
    if not isinstance(fields, list | tuple):
        raise ValueError(f"quantization_config: {fields!r} must be a list of names of modules")
    flat = [each for entry in fields for each in (entry if isinstance(entry, list) else [entry])]
    return tuple(str(each) for each in flat)


def starts_with(pattern: str, names: Iterable[str]) -> bool:
    """Whether a regular expression matches a name from its start, as `re.match`."""
    try:
        return any(re.match(pattern, name) for name in names)
    except re.error as error:
        raise ValueError(f"quantization_config: {pattern!r} is no regular expression: {error}") from error


def listed(entry: str, names: tuple[str, ...]) -> bool:
    """As compressed-tensors reads an entry: `re:` and a regular expression, or the whole name."""
    return starts_with(entry[3:], names) if entry.startswith("re:") else entry in names


def wildcard(entry: str, names: tuple[str, ...]) -> bool:
    """As modelopt reads an entry: a shell pattern for the whole name."""
    return any(fnmatchcase(name, entry) for name in names)


def ends_with(entry: str, names: tuple[str, ...]) -> bool:
    """As transformers reads an entry of an FP8 file: the whole name, its first parts, or its last parts."""
    return any(name == entry or name.startswith(f"{entry}.") or name.endswith(entry) for name in names)
