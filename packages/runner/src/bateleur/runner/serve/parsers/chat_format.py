"""Output format of a model: parameters and grammars of requests, and parsing of reasoning and tool calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.openai.tools import NamedTool, arguments_of, is_strict
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.json_calls import ListedCalls, NamedCall
from bateleur.runner.serve.parsers.options import TOOL_PARSERS, ParserOptions, selected_parsers
from bateleur.runner.serve.parsers.source import THINK, THINK_END, TagTable
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.structured import formats
from bateleur.runner.structured.formats import Format
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.text.tokenizer import Tokenizer, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import refuse

ReasoningPhase: TypeAlias = Literal["none", "possible", "opened"]
"""Reasoning of an answer: none, possible at its start, or opened by the prompt."""
_SPACE = formats.pattern(r"[ \t\r\n]{0,8}")
"""White space after the reasoning. Without a limit, a weak model may write nothing else."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request for the engine: its sampling parameters, and a factory of answer parsers.

    phase: reasoning of the answer: "none", "possible" at its start, or already "opened" by the prompt.
    """

    params: SamplingParams
    phase: ReasoningPhase
    reader: Callable[[], AnswerParser]
    """Creates the parser of one continuation (one of `n`)."""


class ChatFormat:
    """Format of a model's reasoning and tool calls. Immutable and thread-safe."""

    def __init__(self, options: ParserOptions, tokenizer: Tokenizer) -> None:
        """Select parsers by the options. `auto` selects by the chat template."""
        tags, template = tag_tokens(tokenizer), getattr(tokenizer, "chat_template", None)
        self.tool_call_parser, self.reasoning_parser = selected_parsers(options, template, tags.values())
        self._format = None if self.tool_call_parser is None else TOOL_PARSERS[self.tool_call_parser]
        self._may_decide = options.enable_auto_tool_choice
        wanted = {THINK, THINK_END, *(() if self._format is None else self._format.tags())}
        self._table = TagTable({token: tag for token, tag in tags.items() if tag in wanted})
        ids = {tag: token for token, tag in tags.items()}
        self.reasoning_begin_id, self.reasoning_end_id = ids.get(THINK), ids.get(THINK_END)
        """Token ids that begin and end the reasoning; None if the tags are not single tokens."""
        self.special_ids = special_token_ids(tokenizer)

    def prepare(self, parsed: ChatRequest, prompt: ChatPrompt) -> PreparedChat:
        """Prepare a request for the engine.

        Raises ValueError for tool_choice auto without a tool parser, or if `enable_auto_tool_choice` is False.
        """
        phase: ReasoningPhase = "none" if self.reasoning_parser is None else self._reasoning_phase(prompt)
        disabled = any(parsed.template.get(name) is False for name in ("enable_thinking", "thinking"))
        if phase == "possible" and (disabled or parsed.template.get("reasoning_effort") == "none"):
            phase = "none"
        choice, tools = parsed.tool_choice, parsed.tools
        kind: type[ToolFormat] | None = None
        if isinstance(choice, NamedTool):
            kind, tools = NamedCall, tuple(each for each in tools if each["function"]["name"] == choice.name)
        elif choice == "required":
            kind = ListedCalls
        elif choice == "auto":
            if self._format is None or not self._may_decide:
                flag = "--tool-call-parser" if self._may_decide else "--enable-auto-tool-choice"
                refuse("tool_choice", "auto", f"none, required or a tool unless {flag} is given")
            kind = self._format
        max_calls = None if parsed.parallel_tool_calls else 1
        params = replace(parsed.params, return_tags=True)
        decides = kind if choice == "auto" else None
        answer = params.structured_outputs
        assert answer is None or isinstance(answer, StructuredOutputsParams), "SamplingParams converts it"
        if answer is not None or (decides is not None and any(map(is_strict, tools))):
            functions = [Function(each["function"]["name"], arguments_of(each)) for each in tools]
            grammar = answer_grammar(answer, phase, decides, functions, once=max_calls == 1)
            params = replace(params, structured_outputs=grammar)
        opened = None if self.reasoning_parser is None else phase == "opened"

        def reader() -> AnswerParser:
            calls = None if kind is None else kind(tools, max_calls, self._table)
            return AnswerParser(opened=opened, calls=calls, table=self._table)

        return PreparedChat(params, phase, reader)

    def _reasoning_phase(self, prompt: ChatPrompt) -> ReasoningPhase:
        """Return "opened" if the prompt's last reasoning tag is <think>, "none" if it is </think>, else "possible".

        A tag before another special token belongs to an earlier message and does not count.
        """
        begin, end = self.reasoning_begin_id, self.reasoning_end_id
        if begin is None or end is None:
            text = prompt["prompt"].rstrip()
            return "opened" if text.endswith(THINK) else "none" if text.endswith(THINK_END) else "possible"
        for token in reversed(prompt["prompt_token_ids"]):
            if token in (begin, end):
                return "opened" if token == begin else "none"
            if token in self.special_ids:  # end of another message
                return "possible"
        return "possible"


def with_options(parsed: ChatRequest, options: ParserOptions) -> ChatRequest:
    """Return the request with the chat template of the options, and with their default template arguments.

    Arguments that the request sets itself override the defaults of the same names.
    """
    names = {**(options.default_chat_template_kwargs or {}), **parsed.template}
    return replace(parsed, chat_template=options.chat_template, template=names)


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
    functions: callable functions. once: allow one call at most. reasoning: `phase` of `PreparedChat`.
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
    """Build the grammar of free text with calls. Calls must follow the tools' schemas, even within the reasoning."""
    tags = tools.call_tags(functions, once=once)
    if not tools.BARE_STARTS:
        return formats.triggered(tags, tools.triggers(functions))
    barred = "".join(f"\\{each}" for each in tools.BARE_STARTS)
    text = formats.pattern(rf"(\s*[^\s{barred}](?s:.*))?")
    return _after_reasoning(reasoning, formats.either(formats.listed(tags, tools.SEPARATOR, once=once), text))


def _calls_or_answer(
    reasoning: ReasoningPhase, tools: type[ToolFormat], functions: Sequence[Function], answer: Format, *, once: bool
) -> Format:
    """Build the grammar of reasoning followed by calls or an answer. Calls may follow reasoning without an end tag."""
    tags = tools.call_tags(functions, once=once)
    body = formats.either(formats.listed(tags, tools.SEPARATOR, once=once), answer)
    if reasoning == "none" or tools.BARE_STARTS:
        return _after_reasoning(reasoning, body)
    text = formats.triggered(tags, tools.triggers(functions))
    closed = formats.sequence(formats.tagged("", text, THINK_END), _SPACE, body)
    unclosed = {**text, "excludes": [THINK_END], "last": True}  # ends with a call; xgrammar has no such format
    opened = formats.either(closed, unclosed)
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
