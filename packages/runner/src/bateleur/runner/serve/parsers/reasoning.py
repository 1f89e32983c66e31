"""Grammars of whole answers: free reasoning first, then calls of tools, or the text that a request asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.structured.formats import (
    Format,
    const,
    either,
    json_of,
    listed,
    pattern,
    sequence,
    tagged,
    triggered,
    up_to_tag,
)
from bateleur.runner.structured_outputs import StructuredOutputsParams

ReasoningPhase: TypeAlias = Literal["none", "possible", "opened"]
"""Whether an answer has reasoning: it has none, it may begin with some, or the prompt has begun it."""
_SPACE = pattern(r"[ \t\r\n]{0,8}")
"""Behind the reasoning. Without a bound a weak model may write nothing else."""


@dataclass(frozen=True, slots=True)
class Think:
    """Reasoning at the beginning of an answer."""

    BEGIN: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"

    opened: bool = False
    """The prompt ends within the reasoning, so that the answer begins there."""


def answer_grammar(
    answer: StructuredOutputsParams | None,
    reasoning: ReasoningPhase,
    tools: type[ToolFormat] | None,
    functions: Sequence[Function],
    *,
    once: bool,
) -> StructuredOutputsParams | None:
    """The grammar of an answer; None if every answer is right.

    answer: what the text without reasoning and calls must be; tools: notation of the calls that the model may write in
    place of the answer, None for none; functions: those that it may call; once: one call at most.
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
    """Reasoning up to its end tag, and an answer."""
    begin = "" if reasoning == "opened" else Think.BEGIN
    thought = tagged(begin, {"type": "any_text"}, Think.END)
    behind = sequence(thought, _SPACE, answer)
    return behind if reasoning == "opened" else either(answer, behind)


def _calls_in_text(
    reasoning: ReasoningPhase, tools: type[ToolFormat], functions: Sequence[Function], *, once: bool
) -> Format:
    """Any text, with calls that follow the tools' schemas. Calls in the reasoning follow them, too."""
    tags = tools.call_tags(functions, once=once)
    if not tools.BARE_STARTS:
        return triggered(tags, tools.triggers(functions))
    barred = "".join(f"\\{each}" for each in tools.BARE_STARTS)
    text = pattern(rf"(\s*[^\s{barred}](?s:.*))?")
    found = either(listed(tags, tools.SEPARATOR, once=once), text)
    return found if reasoning == "none" else _after_reasoning(reasoning, found)


def _calls_or_answer(
    reasoning: ReasoningPhase,
    tools: type[ToolFormat],
    functions: Sequence[Function],
    answer: Format,
    *,
    once: bool,
) -> Format:
    """Calls or an answer behind the reasoning. Reasoning that has no end may end with calls."""
    tags = tools.call_tags(functions, once=once)
    body = either(listed(tags, tools.SEPARATOR, once=once), answer)
    if reasoning == "none":
        return body
    if tools.BARE_STARTS:
        return _after_reasoning(reasoning, body)
    closed = sequence(tagged("", triggered(tags, tools.triggers(functions)), Think.END), _SPACE, body)
    unclosed = up_to_tag(tags, tools.triggers(functions), [Think.END])
    opened = either(closed, unclosed)
    if reasoning == "opened":
        return opened
    return either(body, sequence(const(Think.BEGIN), opened))


def _answer_format(params: StructuredOutputsParams) -> Format:
    """What the parameters ask for, as a part of a structural tag."""
    if params.json is not None:
        return json_of(json.loads(str(params.json)))
    if params.regex is not None:
        return pattern(params.regex)
    if params.choice is not None:
        return either(*map(const, params.choice))
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    if params.structural_tag is not None:
        return {"type": "structural_tag", **json.loads(str(params.structural_tag))}
    return json_of({"type": "object"})
