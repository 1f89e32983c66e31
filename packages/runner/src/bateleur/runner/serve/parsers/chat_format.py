"""Output format of a model: request parameters, and parsing of its reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bateleur.runner.outputs import CompletionOutput
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.openai.tools import NamedTool, ToolChoice, Tools, arguments_of, is_strict
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.events import Arguments, End, Event, ToolCall
from bateleur.runner.serve.parsers.json_calls import ListedCalls, NamedCall
from bateleur.runner.serve.parsers.options import (
    AUTO,
    NONE,
    TOOL_PARSERS,
    ParserOptions,
    reasoning_parser_of,
    template_text,
    tool_parser_of,
)
from bateleur.runner.serve.parsers.reasoning import ReasoningPhase, Think, answer_grammar
from bateleur.runner.serve.parsers.source import TagTable
from bateleur.runner.serve.parsers.tool_format import Function, ToolFormat
from bateleur.runner.serve.parsers.values import is_complete
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.text.tokenizer import Tokenizer, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import refuse


class AnswerReader:
    """Converts the engine's outputs for one continuation (one of `n`) to events: text, reasoning and tool calls.

    Outputs may be deltas, or one complete output.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._arguments: str | None = None
        """Arguments of the last call so far; None without calls."""

    def read(self, completion: CompletionOutput) -> list[Event]:
        """Return the events of the next output. The last event of all is `End`.

        A stop string that is not a tag truncates a call, as a token limit does. The finish reason of a truncated call
        is not "tool_calls".
        """
        events = self._parser.feed(completion.text, completion.tags)
        reason, stop = completion.finish_reason, completion.stop_reason
        cuts = isinstance(stop, str) and not stop.lstrip().startswith("<")
        if reason is not None:
            events += self._parser.finish(cut=reason != "stop" or cuts)
        for event in events:
            if isinstance(event, ToolCall):
                self._arguments = ""
            elif isinstance(event, Arguments):
                assert self._arguments is not None
                self._arguments += event.text
        if reason is not None:
            called = self._arguments is not None and (not cuts or is_complete(self._arguments))
            events.append(End("tool_calls" if reason == "stop" and called else reason, stop))
        return events


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request for the engine: its sampling parameters, and the parser for its answer."""

    params: SamplingParams
    """Parameters to submit."""
    phase: ReasoningPhase
    """Whether the answer contains reasoning."""
    _table: TagTable
    _reasoning: Think | None
    _format: type[ToolFormat] | None
    _tools: Tools
    _max_calls: int | None

    def reader(self) -> AnswerReader:
        """Create the reader of one continuation (one of `n`)."""
        calls = None if self._format is None else self._format(self._tools, self._max_calls, self._table)
        return AnswerReader(AnswerParser(reasoning=self._reasoning, calls=calls, table=self._table))


class ChatFormat:
    """Format of a model's reasoning and tool calls. Immutable and thread-safe."""

    def __init__(self, options: ParserOptions, tokenizer: Tokenizer) -> None:
        """Select parsers by the options. `auto` selects by the chat template."""
        template = options.chat_template or template_text(getattr(tokenizer, "chat_template", None))
        tags = tag_tokens(tokenizer)
        named = options.tool_call_parser, options.reasoning_parser
        calls = tool_parser_of(template, tags.values()) if named[0] == AUTO else named[0]
        think = reasoning_parser_of(template, tags.values()) if named[1] == AUTO else named[1]
        self.tool_call_parser: str | None = None if calls == NONE else calls
        """Name of the tool parser, or None."""
        self.reasoning_parser: str | None = None if think == NONE else think
        """Name of the reasoning parser, or None."""
        self._format = None if self.tool_call_parser is None else TOOL_PARSERS[self.tool_call_parser]
        self._may_decide = options.enable_auto_tool_choice
        wanted = {Think.BEGIN, Think.END, *(() if self._format is None else self._format.tags())}
        self._table = TagTable({token: tag for token, tag in tags.items() if tag in wanted})
        self._think_ids = {tag: token for token, tag in tags.items() if tag in (Think.BEGIN, Think.END)}
        self.reasoning_begin_id = self._think_ids.get(Think.BEGIN)
        self.reasoning_end_id = self._think_ids.get(Think.END)
        """Token ids that begin and end the reasoning; None if the tags are not single tokens."""
        self.special_ids = special_token_ids(tokenizer)

    def prepare(
        self,
        params: SamplingParams,
        prompt: ChatPrompt,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = "none",
        parallel_tool_calls: bool = True,
        thinking: bool = True,
    ) -> PreparedChat:
        """Prepare a request for this prompt.

        thinking: whether the answer may begin with reasoning if the prompt does not open it; a grammar then allows it.
        Raises ValueError for tool_choice auto without a tool parser.
        """
        phase: ReasoningPhase = "none" if self.reasoning_parser is None else self._reasoning_phase(prompt)
        if phase == "possible" and not thinking:
            phase = "none"
        reasoning = None if self.reasoning_parser is None else Think(opened=phase == "opened")
        kind: type[ToolFormat] | None = None
        if isinstance(tool_choice, NamedTool):
            kind, tools = NamedCall, [each for each in tools if each["function"]["name"] == tool_choice.name]
        elif tool_choice == "required":
            kind = ListedCalls
        elif tool_choice == "auto":
            if self._format is None or not self._may_decide:
                flag = "--tool-call-parser" if self._may_decide else "--enable-auto-tool-choice"
                refuse("tool_choice", "auto", f"none, required or a tool unless {flag} is given")
            kind = self._format
        max_calls = None if parallel_tool_calls else 1
        params = replace(params, return_tags=True)
        decides = kind if tool_choice == "auto" else None
        parsed = params.structured_outputs
        assert parsed is None or isinstance(parsed, StructuredOutputsParams), "SamplingParams converts it"
        if parsed is not None or (decides is not None and any(map(is_strict, tools))):
            functions = [Function(each["function"]["name"], arguments_of(each)) for each in tools]
            params = replace(
                params, structured_outputs=answer_grammar(parsed, phase, decides, functions, once=max_calls == 1)
            )
        return PreparedChat(params, phase, self._table, reasoning, kind, tools, max_calls)

    def _reasoning_phase(self, prompt: ChatPrompt) -> ReasoningPhase:
        """Return the phase in which the answer begins, by the last tags of the prompt."""
        begin, end = self._think_ids.get(Think.BEGIN), self._think_ids.get(Think.END)
        if begin is None or end is None:
            text = prompt["prompt"].rstrip()
            return "opened" if text.endswith(Think.BEGIN) else "none" if text.endswith(Think.END) else "possible"
        for token in reversed(prompt["prompt_token_ids"]):
            if token in (begin, end):
                return "opened" if token == begin else "none"
            if token in self.special_ids:  # end of another message
                return "possible"
        return "possible"


def with_options(parsed: ChatRequest, options: ParserOptions) -> ChatRequest:
    """Return the request with the chat template and template arguments of the options."""
    names = {**(options.default_chat_template_kwargs or {}), **parsed.template}
    return replace(parsed, chat_template=options.chat_template, template=names)


def prepare_chat(chat_format: ChatFormat, parsed: ChatRequest, prompt: ChatPrompt) -> PreparedChat:
    """Call `ChatFormat.prepare` with the fields of a parsed chat request."""
    return chat_format.prepare(
        parsed.params,
        prompt,
        tools=parsed.tools,
        tool_choice=parsed.tool_choice,
        parallel_tool_calls=parsed.parallel_tool_calls,
        thinking=reasoning_enabled(parsed.template),
    )


def reasoning_enabled(template: Mapping[str, Any]) -> bool:
    """Return whether the chat template's arguments do not disable reasoning."""
    off = any(template.get(name) is False for name in ("enable_thinking", "thinking"))
    return not off and template.get("reasoning_effort") != "none"
