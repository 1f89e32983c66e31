"""Conversion of answer events to output items and stream events of the Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall
from bateleur.runner.serve.responses.body import Item

StreamEvent = dict[str, Any]
"""Body of one server-sent event."""
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item's text part, which is also the name of its text events."""


class ResponseWriter:
    """Builds a response from the events of an answer, and yields stream events for every change."""

    def __init__(self, response: Item, custom_tools: frozenset[str] = frozenset()) -> None:
        """response: fields of the response, updated in place. custom_tools: names of the custom tools."""
        self.response = response
        self._custom = custom_tools
        self._number = 0
        self._open: Item | None = None
        self._arguments = ""

    def begin(self) -> Iterator[StreamEvent]:
        """Yield the first events."""
        self.response["status"] = "in_progress"
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def write(self, events: Sequence[Event], logprobs: list[Any] | None = None) -> Iterator[StreamEvent]:
        """Add events of the answer to the response; yields stream events.

        logprobs: log probabilities of the tokens of these events.
        """
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._text("reasoning", text, [])
                case Content(text):
                    yield from self._text("message", text, logprobs or [])
                    logprobs = None
                case ToolCall():
                    yield from self._close("completed")
                    yield from self._begin_call(event)
                case Arguments(_, text):
                    yield from self._add_arguments(text)
                case End(reason, _):
                    yield from self._close("incomplete" if reason in ("length", "abort") else "completed")
                    self._end(reason)

    def end(self, usage: Item) -> Iterator[StreamEvent]:
        """Yield the last event."""
        self.response |= {"usage": usage, "completed_at": int(time.time())}
        status = self.response["status"]
        yield self._event(f"response.{'incomplete' if status == 'cancelled' else status}", response=self._snapshot())

    def fail(self, error: Item) -> Iterator[StreamEvent]:
        """Yield the last event of a failed response. error: `code` and `message`."""
        fields = {"code": error.get("code") or "server_error", "message": error["message"]}
        self.response |= {"status": "failed", "error": fields}
        yield self._event("response.failed", response=self._snapshot())

    def _end(self, reason: str) -> None:
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        details = {"reason": "max_output_tokens"} if reason == "length" else None
        self.response |= {"status": status, "incomplete_details": details}

    # --- items ----------------------------------------------------------------------------------------------

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin_text(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more = {"logprobs": logprobs}
        yield self._item_event(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str) -> Iterator[StreamEvent]:
        item: Item = {"type": kind, "content": [], "status": "in_progress"}
        if kind == "message":
            part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"id": _new_id("msg"), "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item |= {"id": _new_id("rs"), "summary": [], "encrypted_content": None}
        yield from self._add(item)
        item["content"].append(part)
        yield self._item_event("response.content_part.added", content_index=0, part=_copy(part))

    def _begin_call(self, call: ToolCall) -> Iterator[StreamEvent]:
        self._arguments = ""
        item: Item = {"call_id": call.id, "name": call.name, "status": "in_progress"}
        if call.name in self._custom:
            item |= {"type": "custom_tool_call", "id": _new_id("ctc"), "input": ""}
        else:
            item |= {"type": "function_call", "id": _new_id("fc"), "arguments": ""}
        yield from self._add(item)

    def _add_arguments(self, text: str) -> Iterator[StreamEvent]:
        assert self._open is not None
        self._arguments += text
        if self._open["type"] == "function_call":
            yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _add(self, item: Item) -> Iterator[StreamEvent]:
        self._open = item
        self.response["output"].append(item)
        yield self._item_event("response.output_item.added", item=_copy(item), item_id=None)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """Yield the events that complete the open output item, if any."""
        if (item := self._open) is None:
            return
        if item["type"] == "function_call":
            item["arguments"] = self._arguments
            fields = {"name": item["name"], "arguments": self._arguments}
            yield self._item_event("response.function_call_arguments.done", **fields)
        elif item["type"] == "custom_tool_call":
            item["input"] = _custom_input(self._arguments)
            yield self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._item_event("response.custom_tool_call_input.done", input=item["input"])
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            done = f"response.{_PARTS[item['type']]}.done"
            yield self._item_event(done, content_index=0, text=part["text"], **more)
            yield self._item_event("response.content_part.done", content_index=0, part=_copy(part))
        item["status"] = status
        yield self._item_event("response.output_item.done", item=_copy(item), item_id=None)
        self._open = None

    # --- events ---------------------------------------------------------------------------------------------

    def _item_event(self, kind: str, **fields: Any) -> StreamEvent:
        assert self._open is not None
        place = {"output_index": len(self.response["output"]) - 1, "item_id": self._open["id"], **fields}
        return self._event(kind, **{name: value for name, value in place.items() if name != "item_id" or value})

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _snapshot(self) -> Item:
        return {**self.response, "output": [_copy(each) for each in self.response["output"]]}


def _copy(item: Item) -> Item:
    """Copy an item or part for an event, because the original may change before the event is sent."""
    parts: Callable[[Any], Any] = lambda value: [*map(dict, value)] if isinstance(value, list) else value  # noqa: E731
    return {name: parts(value) for name, value in item.items()}


def _custom_input(arguments: str) -> str:
    """Return the text input of a custom tool from its JSON arguments."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
