"""What parsers find in the text of a model, in its order, and the protocol of parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Said:
    """Text for whoever asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """A part of the arguments of the last call: JSON, as text."""

    text: str


Event: TypeAlias = Said | Thought | Called | Argued


class Parser(Protocol):
    """Reads text that comes in pieces.

    What it finds doesn't depend on where the pieces are cut, but for how events of one kind are divided. Everything but
    tags, and white space around them, is in the events, once.
    """

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; what is certain by now."""
        ...

    def finish(self) -> list[Event]:
        """Nothing more will come; the rest."""
        ...


def merged(events: Sequence[Event]) -> list[Event]:
    """The same, with neighbours of one kind as one; a call stays alone."""
    result: list[Event] = []
    parts: list[str] = []
    for event in events:
        if isinstance(event, Called):
            _flush(result, parts)
            result.append(event)
            continue
        if result and parts and type(result[-1]) is not type(event):
            _flush(result, parts)
        if not parts:
            result.append(event)
        parts.append(event.text)
    _flush(result, parts)
    return result


def _flush(result: list[Event], parts: list[str]) -> None:
    """Give the last event all of its text."""
    if parts:
        last = result.pop()
        assert not isinstance(last, Called)
        result.append(type(last)("".join(parts)))
        parts.clear()
