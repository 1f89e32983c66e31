"""Reasoning tags, and grammars of answers: free reasoning, then tool calls or structured output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, TypeAlias

from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.structured import formats
from bateleur.runner.structured.formats import Format
from bateleur.runner.structured_outputs import StructuredOutputsParams

THINK, THINK_END = "<think>", "</think>"
"""Tags around the reasoning, at the start of an answer."""
ReasoningPhase: TypeAlias = Literal["none", "possible", "opened"]
"""Reasoning of an answer: none, possible at its start, or opened by the prompt."""
_SPACE = formats.pattern(r"[ \t\r\n]{0,8}")
"""White space after the reasoning. Without a limit, a weak model may write nothing else."""


def answer_grammar(
    answer: StructuredOutputsParams | None,
    reasoning: ReasoningPhase,
    tools: type[ToolFormat] | None,
    functions: Sequence[Function],
    *,
    once: bool,
) -> StructuredOutputsParams | None:
    """Build the grammar of an answer; None if every answer is valid.

    answer: constraint of the content. tools: format of calls that the model may write instead of the content, or None.
    functions: callable functions. once: allow one call at most.
    """
    if tools is None:
        if answer is None or reasoning == "none":
            return answer
        found = _after_reasoning(reasoning, _answer_format(answer))
    elif answer is None:
        found = _calls_in_text(reasoning, tools, functions, once=once)
    else:
        found = _calls_or_answer(reasoning, tools, functions, _answer_format(answer), once=once)
    compact = answer is not None and answer.disable_any_whitespace
    whole = {"type": "structural_tag", "format": found}
    return StructuredOutputsParams(structural_tag=whole, disable_any_whitespace=compact)


def _after_reasoning(reasoning: ReasoningPhase, answer: Format) -> Format:
    if reasoning == "none":
        return answer
    thought = formats.tagged("" if reasoning == "opened" else THINK, {"type": "any_text"}, THINK_END)
    after = formats.sequence(thought, _SPACE, answer)
    return after if reasoning == "opened" else formats.either(answer, after)


def _calls_in_text(
    reasoning: ReasoningPhase, tools: type[ToolFormat], functions: Sequence[Function], *, once: bool
) -> Format:
    """Build the format of free text with calls. Calls must follow the tools' schemas, even within the reasoning."""
    tags = tools.call_tags(functions, once=once)
    if not tools.BARE_STARTS:
        return formats.triggered(tags, tools.triggers(functions))
    barred = "".join(f"\\{each}" for each in tools.BARE_STARTS)
    text = formats.pattern(rf"(\s*[^\s{barred}](?s:.*))?")
    return _after_reasoning(reasoning, formats.either(formats.listed(tags, tools.SEPARATOR, once=once), text))


def _calls_or_answer(
    reasoning: ReasoningPhase, tools: type[ToolFormat], functions: Sequence[Function], answer: Format, *, once: bool
) -> Format:
    """Build the format of reasoning followed by calls or an answer. Calls may follow reasoning without an end tag."""
    tags = tools.call_tags(functions, once=once)
    body = formats.either(formats.listed(tags, tools.SEPARATOR, once=once), answer)
    if reasoning == "none" or tools.BARE_STARTS:
        return _after_reasoning(reasoning, body)
    closed = formats.sequence(
        formats.tagged("", formats.triggered(tags, tools.triggers(functions)), THINK_END), _SPACE, body
    )
    opened = formats.either(closed, formats.up_to_tag(tags, tools.triggers(functions), [THINK_END]))
    return opened if reasoning == "opened" else formats.either(body, formats.sequence(formats.const(THINK), opened))


def _answer_format(params: StructuredOutputsParams) -> Format:
    if params.json is not None:
        return formats.json_of(json.loads(str(params.json)))
    if params.regex is not None:
        return formats.pattern(params.regex)
    if params.choice is not None:
        return formats.either(*map(formats.const, params.choice))
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    if params.structural_tag is not None:
        return {"type": "structural_tag", **json.loads(str(params.structural_tag))}
    return formats.json_of({"type": "object"})
