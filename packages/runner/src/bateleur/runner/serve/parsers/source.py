"""Incremental text source of the parsers.

Parsers are generators that yield when they need more text. Positions are valid until text is consumed.
"""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from bateleur.runner.outputs import TextTag

T = TypeVar("T")
Parse: TypeAlias = Generator[None, None, T]

THINK, THINK_END = "<think>", "</think>"
"""Tags around the reasoning, at the start of an answer."""
_SPACE = re.compile(r"\s*")
_FIRST_STAND_IN = 0xD800


class Source:
    """The text that the parser has received and not consumed yet."""

    def __init__(self, text: str = "", *, final: bool = False) -> None:
        self.text = text
        self.final = final
        self.cut = False
        """Whether the text was truncated by a limit."""

    def take(self, end: int) -> str:
        """Consume and return the text before a position."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken


def skip_space(source: Source, at: int) -> Parse[int]:
    """Return the position of the next character that is not white space, or the end of the text."""
    while True:
        found = _SPACE.match(source.text, at)
        assert found is not None, "the pattern matches the empty text"
        at = found.end()
        if at < len(source.text) or source.final:
            return at
        yield


def take_tags(source: Source, tags: Sequence[str]) -> Parse[None]:
    """Consume any number of these tags, with the white space before each."""
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
    """Search for the first of several tags."""

    def __init__(self, tags: Iterable[str]) -> None:
        known = sorted(tags, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._beginnings = {tag[:n] for tag in known for n in range(1, len(tag))}
        self._longest = max(map(len, known), default=1) - 1

    def first(self, source: Source, at: int = 0) -> tuple[int, str]:
        """Return the position and text of the first tag.

        Without a tag, the text is "", and the position is where an incomplete tag at the end starts, or the end.
        """
        text = source.text
        if (found := self._pattern.search(text, at)) is not None:
            return found.start(), found[0]
        for start in range(max(at, len(text) - self._longest), len(text)):
            if not source.final and text[start:] in self._beginnings:
                return start, ""
        return len(text), ""


class TagTable:
    """Tags that are single tokens of a model, with a marker character for each.

    A marker is a lone surrogate, which decoded text never contains. It distinguishes the token of a tag from the same
    text in other tokens. Parsers search for markers and for plain tags in the same way.
    """

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        known = tokens or {}
        self._stand_ins = {token: chr(_FIRST_STAND_IN + i) for i, token in enumerate(known)}
        self._by_text = {known[token]: char for token, char in self._stand_ins.items()}
        self._texts = {ord(char): tag for tag, char in self._by_text.items()}

    def marker(self, tag: str) -> str:
        """Return the character that `mark` writes for a tag, or the tag itself if it is not a single token."""
        return self._by_text.get(tag, tag)

    def mark(self, text: str, tags: Sequence[TextTag]) -> str:
        """Replace each tag of this table in the text by its marker. tags: positions of tags in the text."""
        parts, at = [], 0
        for tag in tags:
            char = self._stand_ins.get(tag.token_id)
            if char is not None:
                parts += [text[at : tag.start], char]
                at = tag.end
        return "".join(parts) + text[at:]

    def unmark(self, text: str) -> str:
        """Undo `mark`: replace each marker by its tag, such as `<think>`."""
        return text.translate(self._texts)
