"""Options of chat templates and parsers, and the registry of parsers. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.serve.parsers.hermes import Granite, Hermes, Qwen3Coder
from bateleur.runner.serve.parsers.json_calls import Llama3Json
from bateleur.runner.serve.parsers.kimi_k2 import KimiK2
from bateleur.runner.serve.parsers.pythonic import Lfm2, Olmo3
from bateleur.runner.serve.parsers.source import THINK_END
from bateleur.runner.serve.parsers.tool_format import ToolFormat
from bateleur.runner.utils.arguments import Check, OneOf, flag, mapping, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option

AUTO, NONE = "auto", "none"
TOOL_PARSERS: dict[str, type[ToolFormat]] = {
    "granite": Granite,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "lfm2": Lfm2,
    "llama3_json": Llama3Json,
    "olmo3": Olmo3,
    "qwen3_coder": Qwen3Coder,
}
"""Tool parsers by vLLM's names."""
_TOOL_PARSER_ALIASES = {
    "qwen3_coder": "qwen3_xml qwen3_5 nemotron_v3 nano_v3 super_v3",
    "hermes": "granite4 qwen qwen25 falcon_h1",
    "kimi_k2": "kimi_linear",
    "llama3_json": "llama4_json",
}
_REASONING_PARSER_ALIASES = {
    "think": "qwen3 qwen3-thinking deepseek_r1 deepseek-r1 nemotron_v3 nemotron_3 nano_v3 super_v3 olmo3 kimi_k2 "
    "kimi_linear lfm2 glm45 holo2 granite4"
}
"""Other names of parsers in vLLM and SGLang."""
_ARGUMENTS = maybe(lambda name, value: mapping(name, value, "an object with arguments of the chat template"))
_CALLS_IN_TEMPLATE = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<function_calls>", "olmo3"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
"""Text in a chat template and its tool parser. The first match counts."""


def tool_parser_of(template: str, tags: Collection[str]) -> str | None:
    """Return the tool parser for a chat template; None if the template has no tools, or their format is unknown.

    tags: tokens such as <think>. With <|tool_call_start|> the parser is lfm2 if the template shows no known format.
    """
    if "tools" not in template:
        return None
    default = "lfm2" if "<|tool_call_start|>" in tags else None
    return next((name for mark, name in _CALLS_IN_TEMPLATE if mark in template), default)


def reasoning_parser_of(template: str, tags: Collection[str]) -> str | None:
    """Return the reasoning parser: "think" if the chat template or the tokenizer's `tags` have </think>, else None."""
    return "think" if THINK_END in template or THINK_END in tags else None


def _template(name: str, value: Any) -> str:
    if "{{" in text(name, value) or "{%" in value:
        return str(value)
    try:
        return Path(value).read_text("utf-8")
    except (OSError, ValueError) as error:
        refuse(name, value, f"a template with {{{{ or {{%, or a template file ({error})")


def _parser(names: Collection[str], aliases: Mapping[str, str]) -> Check:
    """Return a check that accepts `names`, aliases, auto and none. Aliases are replaced by names, and None by none."""
    names_of = {alias: name for name, others in aliases.items() for alias in others.split()}
    check = OneOf((AUTO, NONE, *names, *names_of))

    def checked(name: str, value: Any) -> str:
        spelled: str = NONE if value is None else check(name, value)
        return names_of.get(spelled, spelled)

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions(Checked):
    """Options of chat templates and output parsers."""

    chat_template: str | None = option(None, maybe(_template))
    """Jinja chat template, or a file with one (default: the checkpoint's)."""
    default_chat_template_kwargs: Mapping[str, Any] | None = option(None, _ARGUMENTS, hashed=False)
    """Default arguments of the chat template, such as {"enable_thinking": false}."""
    tool_call_parser: str = option(AUTO, _parser(TOOL_PARSERS, _TOOL_PARSER_ALIASES))
    """Parser of tool calls: granite, hermes, kimi_k2, lfm2, llama3_json, olmo3, qwen3_coder, none, or auto, which
    selects by the chat template (default: auto)."""
    reasoning_parser: str = option(AUTO, _parser(("think",), _REASONING_PARSER_ALIASES))
    """Parser of reasoning: think for <think> tags, none to leave the reasoning in the content, or auto, which
    selects by the chat template (default: auto)."""
    enable_auto_tool_choice: bool = option(True, flag)
    """Allow tool_choice auto, the default of requests with tools (default: true)."""


def selected_parsers(options: ParserOptions, template: Any, tags: Collection[str]) -> tuple[str | None, str | None]:
    """Return the names of the tool call parser and the reasoning parser; None for `none`, or if `auto` finds none.

    `auto` searches the chat template of the options, else `template`: the checkpoint's, or a mapping with several.
    tags: the tokenizer's special tokens and other tokens in the form of a tag, such as <think>.
    """
    named = template.values() if isinstance(template, Mapping) else [template]
    text = options.chat_template or "\n".join(each for each in named if isinstance(each, str))
    calls, think = options.tool_call_parser, options.reasoning_parser
    found = {NONE: None, AUTO: tool_parser_of(text, tags)}.get(calls, calls)
    return found, {NONE: None, AUTO: reasoning_parser_of(text, tags)}.get(think, think)
