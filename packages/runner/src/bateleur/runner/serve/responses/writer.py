"""Conversion of answer events to output items and stream events of the Responses API."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall
from bateleur.runner.serve.responses.body import Item


class ResponseWriter:
    """Builds a response from the events of an answer, and yields stream events for every change."""

    def __init__(self, response: Item, custom_tools: frozenset[str] = frozenset()) -> None:
        """response: fields of the response, updated in place. custom_tools: names of the custom tools."""
        self.response, self._custom = response, custom_tools
        self._number, self._arguments = 0, ""
        self._open: Item | None = None
        self._logprobs: list[Any] = []
        """Log probabilities of tokens whose text is not reported yet."""

    def begin(self) -> Iterator[Item]:
        """Yield the first events: `response.created` and `response.in_progress`."""
        self.response["status"] = "in_progress"
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def write(self, events: Sequence[Event], logprobs: Sequence[Any] = (), *, answer_start: int = 0) -> Iterator[Item]:
        """Add the events of an output to the response; yields stream events.

        logprobs: log probabilities of the tokens of the output, or none. They are reported with the next text.
        answer_start: index of the token after the end tag of the reasoning; 0 if the output has no such tag.
        """
        if answer_start:
            self._logprobs = [*logprobs[answer_start:]]
        elif not events or any(isinstance(each, Content | End) for each in events):
            self._logprobs += logprobs
        else:
            self._logprobs = []  # these tokens are reasoning or a call
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._text("reasoning", text, [])
                case Content(text):
                    yield from self._text("message", text, self._logprobs)
                    self._logprobs = []
                case ToolCall(_, call_id, name):
                    yield from self._close("completed")
                    self._arguments = ""
                    item: Item = {"call_id": call_id, "name": name, "status": "in_progress"}
                    if name in self._custom:
                        item |= {"type": "custom_tool_call", "id": _new_id("ctc"), "input": ""}
                    else:
                        item |= {"type": "function_call", "id": _new_id("fc"), "arguments": ""}
                    yield from self._add(item)
                case Arguments(_, text):
                    self._arguments += text
                    if self._open is not None and self._open["type"] == "function_call":
                        yield self._item_event("response.function_call_arguments.delta", delta=text)
                case End(reason, _):
                    if self._logprobs and self._open is not None and self._open["type"] == "message":
                        yield from self._text("message", "", self._logprobs)  # of tokens without text
                    yield from self._close("incomplete" if reason in ("length", "abort") else "completed")
                    status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
                    details = {"reason": "max_output_tokens"} if reason == "length" else None
                    self.response |= {"status": status, "incomplete_details": details}

    def end(self, usage: Item) -> Iterator[Item]:
        """Set the token usage, and yield the last event: `response.completed` or `response.incomplete`."""
        self.response |= {"usage": usage, "completed_at": int(time.time())}
        status = self.response["status"]
        yield self._event(f"response.{'incomplete' if status == 'cancelled' else status}", response=self._snapshot())

    def fail(self, error: Item) -> Iterator[Item]:
        """Yield the last event of a failed response. error: `code` and `message`."""
        fields = {"code": error.get("code") or "server_error", "message": error["message"]}
        self.response |= {"status": "failed", "error": fields}
        yield self._event("response.failed", response=self._snapshot())

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> Iterator[Item]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin_text(kind)
        assert self._open is not None
        part, more = self._open["content"][0], {"logprobs": logprobs} if kind == "message" else {}
        part["text"] += text
        part.get("logprobs", []).extend(logprobs)
        yield self._item_event(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str) -> Iterator[Item]:
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

    def _add(self, item: Item) -> Iterator[Item]:
        self._open = item
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=_copy(item))

    def _close(self, status: str) -> Iterator[Item]:
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
            yield self._item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._item_event("response.content_part.done", content_index=0, part=_copy(part))
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=_copy(item))
        self._open = None

    def _item_event(self, kind: str, **fields: Any) -> Item:
        assert self._open is not None
        return self._event(kind, output_index=self._index, item_id=self._open["id"], **fields)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _event(self, kind: str, **fields: Any) -> Item:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _snapshot(self) -> Item:
        return {**self.response, "output": [_copy(each) for each in self.response["output"]]}


def _copy(item: Item) -> Item:
    """Copy an item or part for an event, because the original may change before the event is sent."""
    return {name: [*map(dict, value)] if isinstance(value, list) else value for name, value in item.items()}


def _custom_input(arguments: str) -> str:
    """Return the text input of a custom tool from its JSON arguments."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
