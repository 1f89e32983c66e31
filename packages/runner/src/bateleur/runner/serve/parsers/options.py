"""How chats are written for a model, and its answers read: flags of the command line. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from bateleur.runner.arguments import OneOf, flag, maybe, refuse, text
from bateleur.runner.openai.requests import ChatRequest
from bateleur.runner.openai.tools import Named, Tools
from bateleur.runner.options import Checked, option
from bateleur.runner.serve.parsers.events import Parser
from bateleur.runner.serve.parsers.forced import ListedCalls, NamedCall
from bateleur.runner.serve.parsers.hermes import Hermes
from bateleur.runner.serve.parsers.message import Message
from bateleur.runner.serve.parsers.qwen3_coder import Qwen3Coder
from bateleur.runner.serve.parsers.think import Think

TOOL_PARSERS: dict[str, Callable[[Tools, int | None], Parser]] = {"hermes": Hermes, "qwen3_coder": Qwen3Coder}
REASONING_PARSERS: dict[str, type[Think]] = {"think": Think, "qwen3": Think}


def _template(name: str, value: Any) -> str:
    """What a file holds, or a template as it is."""
    if "{{" in text(name, value) or "{%" in value:
        return str(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:
        refuse(name, value, f"a template, which has {{{{ or {{% in it, or a file with one ({error})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions(Checked):
    """How chats are written, and their answers read."""

    chat_template: str | None = option(None, maybe(_template))
    """Jinja template that writes chats, or a file with one; default: the checkpoint's."""
    tool_call_parser: str | None = option(None, maybe(OneOf(tuple(TOOL_PARSERS))))
    """How the model writes calls of tools: hermes or qwen3_coder."""
    reasoning_parser: str | None = option(None, maybe(OneOf(tuple(REASONING_PARSERS))))
    """How the model marks its reasoning: think or qwen3, which are one, for <think>; default: it is told as content."""
    enable_auto_tool_choice: bool = option(False, flag)
    """Let the model decide whether it calls a tool, as tools without a tool_choice ask for; needs tool_call_parser."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            refuse("enable_auto_tool_choice", True, "False without tool_call_parser")

    def readable(self, asked: ChatRequest) -> ChatRequest:
        """The same by the template given here, if any, and so that calls can be read: some models have their tags as
        special tokens, which text leaves out.

        Raises ValueError for calls that nobody here could read.
        """
        asked = replace(asked, chat_template=self.chat_template)
        if asked.tool_choice != "auto":
            return asked
        if not self.enable_auto_tool_choice:
            rule = (
                "none, required or a tool, unless there are --enable-auto-tool-choice and --tool-call-parser"
            )
            refuse("tool_choice", "auto", rule)
        return replace(asked, params=replace(asked.params, skip_special_tokens=False))

    def message(self, asked: ChatRequest, prompt: str | None) -> Message:
        """A reader for one continuation. prompt: its text, which may have begun the reasoning.

        Text that has to follow a grammar has no reasoning in it.
        """
        reasoning: Parser | None = None
        if self.reasoning_parser is not None and asked.params.structured_outputs is None:
            kind = REASONING_PARSERS[self.reasoning_parser]
            reasoning = kind(opened=(prompt or "").rstrip().endswith(kind.TAG))
        return Message(
            reasoning=reasoning, calls=self._calls(asked), make_id=lambda: f"call_{uuid4().hex[:24]}"
        )

    def _calls(self, asked: ChatRequest) -> Parser | None:
        if isinstance(asked.tool_choice, Named):
            return NamedCall(asked.tool_choice.name)
        if asked.tool_choice == "required":
            return ListedCalls(asked.tools)
        if asked.tool_choice == "none" or self.tool_call_parser is None:
            return None
        return TOOL_PARSERS[self.tool_call_parser](asked.tools, None if asked.parallel_tool_calls else 1)
