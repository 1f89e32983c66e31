"""How chats are written for a model, and its answers read: flags of the command line. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.serve.parsers.names import (
    AUTO,
    NONE,
    REASONING_PARSER_ALIASES,
    REASONING_PARSERS,
    TOOL_PARSER_ALIASES,
    TOOL_PARSERS,
)
from bateleur.runner.utils.arguments import OneOf, flag, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option


def _template(name: str, value: Any) -> str:
    """A template, or the contents of a file with one."""
    if "{{" in text(name, value) or "{%" in value:
        return str(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:
        refuse(name, value, f"a template, which has {{{{ or {{% in it, or a file with one ({error})")


def _names(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "an object: names for the chat template, and their values")
    return dict(value)


def _parser(parsers: Collection[str], aliases: Mapping[str, str]) -> Callable[[str, Any], str]:
    """The check of a parser's name; returns our name of it. None is `none`."""
    check = OneOf((AUTO, NONE, *parsers, *aliases))

    def checked(name: str, value: Any) -> str:
        spelled: str = NONE if value is None else check(name, value)
        return aliases.get(spelled, spelled)

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions(Checked):
    """How chats are written, and their answers read."""

    chat_template: str | None = option(None, maybe(_template))
    """Jinja template that writes chats, or a file with one (default: the checkpoint's)."""
    default_chat_template_kwargs: Mapping[str, Any] | None = option(None, maybe(_names), hashed=False)
    """Names for the chat template if a request does not give them, such as {"enable_thinking": false}."""
    tool_call_parser: str = option(AUTO, _parser(TOOL_PARSERS, TOOL_PARSER_ALIASES))
    """Notation of the model's tool calls: granite, hermes, kimi_k2, lfm2, llama3_json, olmo3, qwen3_coder, none, or
    auto, which chooses by the chat template (default: auto)."""
    reasoning_parser: str = option(AUTO, _parser(REASONING_PARSERS, REASONING_PARSER_ALIASES))
    """Marks of the model's reasoning: think for <think>, none, which leaves the reasoning in the content, or auto,
    which chooses by the chat template (default: auto)."""
    enable_auto_tool_choice: bool = option(True, flag)
    """Let the model decide whether it calls a tool, if a request has tools and no tool_choice (default: true)."""
