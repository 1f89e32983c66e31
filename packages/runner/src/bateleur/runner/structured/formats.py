"""Constructors of structural tags. See `structural_tag` for what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Format: TypeAlias = Mapping[str, Any]


def const(text: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def pattern(regex: str) -> Format:
    """Text that matches a regular expression."""
    return {"type": "regex", "pattern": regex}


def json_of(schema: Mapping[str, Any]) -> Format:
    """JSON that follows this schema."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Format) -> Format:
    """All of these, in this order."""
    return {"type": "sequence", "elements": elements}


def either(*elements: Format) -> Format:
    """One of these."""
    return {"type": "or", "elements": elements}


def tagged(begin: str, content: Format, end: str) -> Format:
    """Content between `begin` and `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(tags: Sequence[Format], separator: str, *, once: bool) -> Format:
    """At least one of these tags; several with `separator` between them, unless `once`."""
    kinds = {"at_least_one": True, "stop_after_first": once}
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **kinds}


def triggered(tags: Sequence[Format], triggers: Sequence[str]) -> Format:
    """Free text in which each trigger starts one of these tags."""
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def up_to_tag(tags: Sequence[Format], triggers: Sequence[str], excludes: Sequence[str]) -> Format:
    """Free text without `excludes` that ends with one of the tags. xgrammar has no such format."""
    return {**triggered(tags, triggers), "excludes": excludes, "last": True}
