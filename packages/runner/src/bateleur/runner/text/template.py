"""A chat template, which is a Jinja program, run as the makers of checkpoints expect.

What they expect is what transformers does: blocks that leave no line behind, a `tojson` that escapes nothing for
HTML, `raise_exception`, `strftime_now`, `break` and `continue`, `{% generation %}` around answers, and special tokens
as names. A template comes from whoever made the checkpoint, so it runs in Jinja's sandbox and sees plain data alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; templates read the first, or the second."""
_MARK = "bateleur-text-goes-on-here "
"""Stands where a final message ends, to be found in what was written; the space tells whether that was trimmed."""


def write_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final_message: bool = False,
    names: Mapping[str, Any],
) -> str:
    """What a template makes of these messages.

    names: everything else that it sees, such as `tools`, `add_generation_prompt` and special tokens.
    continue_final_message: end behind the text of the last message.

    Raises whatever the template raises; ValueError for a last message that does not stand in what was written.
    """
    told = [_with_reasoning(_plain({k: v for k, v in each.items() if v is not None})) for each in messages]
    last = _mark_end(told[-1]) if continue_final_message else ""
    written = _compiled(template).render(messages=told, **_plain(names))
    return _cut(written, last) if continue_final_message else written


def _mark_end(message: dict[str, Any]) -> str:
    """Put the mark behind the text of a message; returns the text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(content or ()):
        if isinstance(part.get("text"), str):
            text = str(part["text"])
            part["text"] = text + _MARK
            return text
    raise ValueError("the last message has no text that could go on")


def _cut(written: str, last: str) -> str:
    place = written.rfind(_MARK.strip())
    if place < 0 or last.strip() not in written:
        raise ValueError("the last message does not stand in what the template wrote, so it cannot go on")
    kept = written[:place]
    return kept if written.startswith(_MARK, place) else kept.rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if it has any, under the names that templates read."""
    said = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


def _plain(value: Any) -> Any:
    """JSON's types alone: methods of other objects would be open to a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)] if isinstance(value, list) else (*map(_plain, value),)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}` says which text is an answer's, for training: here what is inside is written."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """A call of `_inside` with what stands inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Names(Namespace):
    """Jinja's namespace, but for attributes that lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be called `self`
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace of a chat template holds no attribute {name!r}")


class _Dict:
    """`dict` as templates call it, without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """The same value for every key."""
        return dict.fromkeys(keys, value)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Names,
    }
    return sandbox.from_string(template)
