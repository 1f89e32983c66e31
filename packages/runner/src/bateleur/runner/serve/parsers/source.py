"""Text that is read while it is still being written.

Readers are generators: one that needs more text than there is yields, and goes on when there is more. They return what
they found. Positions are those in `Source.text`, and stay right until text is taken from it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from bateleur.runner.outputs import TextTag

T = TypeVar("T")
Reader: TypeAlias = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_FIRST_STAND_IN = 0xD800


class Source:
    """What has been written and not been taken yet."""

    def __init__(self, text: str = "", *, final: bool = False) -> None:
        self.text = text
        self.final = final
        """Nothing more will come."""
        self.cut = False
        """The text ends at a limit, and not where the model ended it."""

    def take(self, end: int) -> str:
        """Remove the text before a position; returns it."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken


def skip_space(source: Source, at: int) -> Reader[int]:
    """Position of the next character that is no white space; the end of the text if there is none."""
    while True:
        found = _SPACE.match(source.text, at)
        assert found is not None, "it matches nothing as well"
        at = found.end()
        if at < len(source.text) or source.final:
            return at
        yield


def take_tags(source: Source, tags: Sequence[str]) -> Reader[None]:
    """Take any number of these tags, and the white space before each of them."""
    while True:
        at = yield from skip_space(source, 0)
        found = next((tag for tag in tags if source.text.startswith(tag, at)), "")
        if found:
            source.take(at + len(found))
        elif not source.final and any(tag.startswith(source.text[at:]) for tag in tags):
            yield
        else:
            return


class Search:
    """Looks for the first of several tags."""

    def __init__(self, tags: Iterable[str]) -> None:
        known = sorted(tags, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._beginnings = {tag[:n] for tag in known for n in range(1, len(tag))}
        self._longest = max(map(len, known), default=1) - 1

    def first(self, source: Source, at: int = 0) -> tuple[int, str]:
        """Where the first tag begins, and the tag; if there is none, where text begins that may become one.

        at: the position from which to look.
        """
        text = source.text
        if (found := self._pattern.search(text, at)) is not None:
            return found.start(), found[0]
        for start in range(max(at, len(text) - self._longest), len(text)):
            if not source.final and text[start:] in self._beginnings:
                return start, ""
        return len(text), ""


class TagTable:
    """Tags that are one token of a model, and a character that stands for each.

    The character is a lone surrogate, which decoded text never holds. So a tag is never taken for the same text in
    other tokens, and readers look for tags of both kinds in the same way.
    """

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        """`tokens`: ids and texts of these tags."""
        known = tokens or {}
        self._stand_ins = {token: chr(_FIRST_STAND_IN + i) for i, token in enumerate(known)}
        self._by_text = {known[token]: char for token, char in self._stand_ins.items()}
        self._texts = {ord(char): tag for tag, char in self._by_text.items()}

    def marker(self, tag: str) -> str:
        """What stands for a tag in marked text: its character, or the tag itself if it is not one token."""
        return self._by_text.get(tag, tag)

    def is_token(self, tag: str) -> bool:
        """Whether the tag is one token."""
        return tag in self._by_text

    def mark(self, text: str, tags: Sequence[TextTag]) -> str:
        """The text with the characters of known tags in the places of these tags."""
        parts, at = [], 0
        for tag in tags:
            char = self._stand_ins.get(tag.token_id)
            if char is not None:
                parts += [text[at : tag.start], char]
                at = tag.end
        return "".join(parts) + text[at:]

    def unmark(self, text: str) -> str:
        """Marked text as the model wrote it."""
        return text.translate(self._texts)
