"""Constructors for the formats (grammar nodes) of structural tags. `structural_tag` defines what each accepts."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Format: TypeAlias = Mapping[str, Any]


def const(text: str) -> Format:
    """Build a format that accepts exactly this text."""
    return {"type": "const_string", "value": text}


def pattern(regex: str) -> Format:
    """Build a format that accepts text that matches a regular expression."""
    return {"type": "regex", "pattern": regex}


def json_of(schema: Mapping[str, Any]) -> Format:
    """Build a format that accepts JSON that follows this schema."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Format) -> Format:
    """Build a format that accepts all of these elements in this order."""
    return {"type": "sequence", "elements": elements}


def either(*elements: Format) -> Format:
    """Build a format that accepts one of these elements."""
    return {"type": "or", "elements": elements}


def tagged(begin: str, content: Format, end: str) -> Format:
    """Build a format that accepts content between the texts `begin` and `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(tags: Sequence[Format], separator: str, *, once: bool) -> Format:
    """Build a format that accepts one or more of these `tagged` formats, separated by `separator`; one if `once`."""
    kinds = {"at_least_one": True, "stop_after_first": once}
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **kinds}


def triggered(tags: Sequence[Format], triggers: Sequence[str]) -> Format:
    """Build a format that accepts free text in which each trigger text must start one of these `tagged` formats."""
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
