"""How the text of a model is read as a message."""

from __future__ import annotations

from typing import Any, Protocol

from bateleur.runner.arguments import refuse
from bateleur.runner.openai.requests import ChatRequest
from bateleur.runner.serve.service import Service


class MessageReader(Protocol):
    """Reads the text of one continuation, as it comes or at once."""

    def feed(self, text: str) -> dict[str, Any]:
        """What a further piece of text adds to the message, as the `delta` of a chunk; empty if nothing yet."""
        ...

    def finish(self) -> dict[str, Any]:
        """What the end of the text adds."""
        ...

    def whole(self, text: str) -> dict[str, Any]:
        """All of a message, but for its role; this reads one text."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> dict[str, Any]:
        """It is passed on."""
        return {"content": text} if text else {}

    def finish(self) -> dict[str, Any]:
        """Nothing was held back."""
        return {}

    def whole(self, text: str) -> dict[str, Any]:
        """The content."""
        return {"content": text}


def message_reader(service: Service, asked: ChatRequest) -> MessageReader:
    """A reader for one continuation. ValueError for what is asked for and cannot be read."""
    if asked.tool_choice not in ("none", "auto"):
        refuse("tool_choice", asked.tool_choice, "none or auto")
    return PlainText()
