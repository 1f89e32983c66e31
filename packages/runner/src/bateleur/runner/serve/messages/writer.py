"""Conversion of answer events to Anthropic's content blocks and stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from bateleur.runner.serve.messages.body import Block
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall

StreamEvent = dict[str, Any]
"""Body of one server-sent event."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Builds a message from the events of an answer, and yields stream events for every change."""

    def __init__(self, message_id: str, model: str) -> None:
        self.message: Block = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._open: Block | None = None
        self._json = ""

    def begin(self, usage: Block) -> Iterator[StreamEvent]:
        """Yield the first events, once the prompt tokens are counted."""
        self.message["usage"] = usage
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def write(self, events: Sequence[Event]) -> Iterator[StreamEvent]:
        """Add events of the answer to the message; yields stream events."""
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._text("thinking", text)
                case Content(text):
                    yield from self._text("text", text)
                case ToolCall():
                    call = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                    yield from self._begin(call)
                case Arguments(_, text):
                    self._json += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case End(reason, stop):
                    yield from self._close()
                    default = "stop_sequence" if isinstance(stop, str) else "end_turn"
                    self.message["stop_reason"] = _STOP_REASONS.get(reason, default)
                    self.message["stop_sequence"] = stop if isinstance(stop, str) else None

    def end(self, usage: Block) -> Iterator[StreamEvent]:
        """Yield the last events."""
        self.message["usage"] = usage
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        assert self._open is not None
        self._open[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        yield from self._close()
        self._open, self._json = block, ""
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _close(self) -> Iterator[StreamEvent]:
        """Yield the events that complete the open content block, if any."""
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            self._open["input"] = _object(self._json)
        elif self._open["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: Block) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _object(arguments: str) -> Any:
    """Parse the arguments of a tool call. Truncated ones become {}; the stop reason shows the truncation."""
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return {}
