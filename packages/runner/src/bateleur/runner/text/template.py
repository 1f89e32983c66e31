"""Runs chat templates (Jinja programs) in a sandbox, with transformers' environment and plain data only."""

import json
from collections.abc import Mapping, Sequence
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
"""Names of a message's reasoning; templates read the first or the second."""
_MARK = "bateleur-text-goes-on-here "
"""Appended to the final message to find its end in the output; the space shows whether the template strips it."""


def write_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final_message: bool = False,
    names: Mapping[str, Any],
) -> str:
    """Return a conversation as the template writes it.

    names: all other variables, such as `tools`, `add_generation_prompt` and special tokens.
    continue_final_message: end after the text of the last message.

    Raises the errors of the template; ValueError if the last message is not in the output.
    """
    plain = [_with_reasoning(_plain({k: v for k, v in each.items() if v is not None})) for each in messages]
    last = _mark_end(plain[-1]) if continue_final_message else ""
    written = _compiled(template).render(messages=plain, **_plain(names))
    if not continue_final_message:
        return written
    place = written.rfind(_MARK.strip())
    if place < 0 or last.strip() not in written:
        raise ValueError("the chat template changes the last message, so it can't be continued")
    kept = written[:place]
    return kept if written.startswith(_MARK, place) else kept.rstrip()


def _mark_end(message: dict[str, Any]) -> str:
    """Append a marker to the text of a message, to find its end in the output. Returns the text without the marker."""
    content = message.get("content")
    places = (
        [(message, "content")] if isinstance(content, str) else [(each, "text") for each in reversed(content or ())]
    )
    for part, name in places:
        if isinstance(text := part.get(name), str):
            part[name] = text + _MARK
            return text
    raise ValueError("the last message has no text to continue")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning, if any, under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return the value with only JSON's types, because templates could call methods of other objects."""
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
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks answers for training. Its text is written unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Names(Namespace):
    """Jinja's `namespace`, which rejects attributes that begin with an underscore and could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, so that it can be an attribute
        self, *given = args
        for name in (attributes := dict(*given, **kwargs)):
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace of a chat template can't have the attribute {name!r}")


class _Dict:
    """`dict` for templates, without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
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
