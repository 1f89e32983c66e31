"""Names of parsers, and which of them fits a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bateleur.runner.serve.parsers.hermes import Granite, Hermes, Qwen3Coder
from bateleur.runner.serve.parsers.kimi_k2 import KimiK2
from bateleur.runner.serve.parsers.llama3_json import Llama3Json
from bateleur.runner.serve.parsers.pythonic import Lfm2, Olmo3
from bateleur.runner.serve.parsers.think import Think
from bateleur.runner.serve.parsers.tool_format import ToolFormat

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
"""Notations of tool calls by name. The names are vLLM's."""
TOOL_PARSER_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "qwen3_5": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "nano_v3": "qwen3_coder",
    "super_v3": "qwen3_coder",
    "granite4": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "falcon_h1": "hermes",
    "kimi_linear": "kimi_k2",
    "llama4_json": "llama3_json",
}
"""Other names of the same notations, in vLLM and SGLang."""
REASONING_PARSERS: dict[str, type[Think]] = {"think": Think}
"""Marks of reasoning by name."""
REASONING_PARSER_ALIASES = dict.fromkeys(
    (
        *(
            "qwen3",
            "deepseek_r1",
            "deepseek-r1",
            "nemotron_v3",
            "nemotron_3",
            "nano_v3",
            "super_v3",
            "kimi_k2",
            "kimi_linear",
        ),
        *("olmo3", "lfm2", "glm45", "holo2", "granite4", "qwen3-thinking"),
    ),
    "think",
)
"""Other names of <think> and </think>, in vLLM and SGLang."""
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
"""Texts in a chat template, the first of which tells the notation."""


def tool_parser_of(template: str, tags: Collection[str]) -> str | None:
    """Name of the notation of a chat template; None if the template tells the model of no tools, or of another one.

    tags: those of the tokenizer, which LFM2's templates leave out.
    """
    if "tools" not in template:
        return None
    found = next((name for mark, name in _CALLS_IN_TEMPLATE if mark in template), None)
    if found is None and "<|tool_call_start|>" in tags:
        return "lfm2"
    return found


def reasoning_parser_of(template: str, tags: Collection[str]) -> str | None:
    """Name of the marks of reasoning of a model; None if it has none."""
    return "think" if Think.END in template or Think.END in tags else None


def template_text(template: Any) -> str:
    """A chat template as one text. It may be several by name."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""
