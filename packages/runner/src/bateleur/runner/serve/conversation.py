"""Answers to conversations as events, for chat completions, responses and messages."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import Request

from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.openai.replies import Usage
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.openai.tools import is_strict
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.chat_format import PreparedChat, with_options
from bateleur.runner.serve.parsers.events import Content, Event, Reasoning, ToolCall
from bateleur.runner.serve.service import Service, merge_outputs
from bateleur.runner.serve.thinking_budget import ThinkingBudget
from bateleur.runner.text.chat import ChatPrompt


@dataclass(frozen=True, slots=True)
class Report:
    """New output of one continuation (one of a request's `n` answers)."""

    output: RequestOutput
    completion: CompletionOutput
    events: list[Event]


@dataclass(slots=True)
class Answer:
    """The answer to a conversation, while the engine generates it."""

    service: Service
    parsed: ChatRequest
    prepared: PreparedChat
    outputs: AsyncGenerator[RequestOutput, None]
    usage: Usage = field(default_factory=lambda: Usage(num_reasoning=0))
    _readers: dict[int, AnswerParser] = field(default_factory=dict)
    _num_reasoning: dict[int, int] = field(default_factory=dict)
    _answering: set[int] = field(default_factory=set)
    _has_reasoning: bool = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including the end tag."""
        return sum(self._num_reasoning.values()) if self._has_reasoning else 0

    async def reports(self) -> AsyncGenerator[Report, None]:
        """Yield a report for each output of each continuation. Closing the generator aborts the request."""
        async with aclosing(self.outputs) as outputs:
            async for output in outputs:
                self.usage.count(output)
                for completion in output.outputs:
                    yield self._read(output, completion)

    async def whole(self, request: Request) -> list[Report]:
        """Return one report per continuation, without streaming. Raises ClientDisconnect if the client disconnects."""
        output = await self.service.cancel_on_disconnect(merge_outputs(self.outputs), request)
        self.usage.count(output)
        return [self._read(output, completion) for completion in output.outputs]

    def _read(self, output: RequestOutput, completion: CompletionOutput) -> Report:
        first = completion.index not in self._readers
        if first:
            self._readers[completion.index] = self.prepared.reader()
        events = self._readers[completion.index].read(completion)
        self._count_reasoning(completion, events)
        if not self.parsed.include_reasoning:
            events = [each for each in events if not isinstance(each, Reasoning)]
        last = self.parsed.messages[-1]
        if first and self.parsed.echo and last["role"] == "assistant":
            events = [Content(last["content"]), *events]
        return Report(output, completion, events)

    def _count_reasoning(self, completion: CompletionOutput, events: list[Event]) -> None:
        index, ids = completion.index, completion.token_ids
        self._has_reasoning = self._has_reasoning or any(isinstance(each, Reasoning) for each in events)
        if index in self._answering:
            return
        ends = [i for i, token in enumerate(ids) if token == self.service.chat_format.reasoning_end_id]
        count = len(ids)
        if ends or any(isinstance(each, Content | ToolCall) for each in events):
            self._answering.add(index)
            count = ends[0] + 1 if ends else 0
        self._num_reasoning[index] = self._num_reasoning.get(index, 0) + count
        self.usage.num_reasoning = self.num_reasoning_tokens


async def render_prompt(service: Service, parsed: ChatRequest) -> tuple[ChatRequest, ChatPrompt]:
    """Return the request with the server's options, and its prompt. Raises HTTPException if the template refuses it."""
    service.adapter_of(parsed.model)
    parsed = with_options(parsed, service.config)
    with http_errors(parsed.names):
        too_long = service.exceeds_context(len(repr((parsed.messages, parsed.tools))))
        prompt = await service.llm.run_in_thread(lambda: parsed.prompt_for(service.llm.llm.tokenizer), long=too_long)
    return parsed, prompt


async def answer(service: Service, parsed: ChatRequest, reply_id: str) -> Answer:
    """Submit a conversation. Raises HTTPException if it is invalid or the queue is full."""
    parsed, prompt = await render_prompt(service, parsed)
    strict = parsed.tool_choice == "auto" and any(map(is_strict, parsed.tools))
    if strict and parsed.params.structured_outputs is not None:
        # One grammar for both follows, whose errors then are those of the tools.
        with http_errors(parsed.names):
            prepare = partial(service.llm.llm.prepare, prompt, parsed.params, request_id=reply_id)
            await service.llm.run_in_thread(prepare, long=True)
        parsed = replace(parsed, names={**parsed.names, "structured_outputs": "tools"})
    with http_errors(parsed.names):
        prepared = service.chat_format.prepare(parsed, prompt)
        budget = ThinkingBudget.of(service, parsed, prompt, prepared)
    if budget is not None:
        return Answer(service, parsed, prepared, await budget.submit(reply_id))
    parsed = replace(parsed, params=prepared.params)
    reader = await service.submit([prompt], parsed, reply_id)
    return Answer(service, parsed, prepared, service.outputs(reader))
