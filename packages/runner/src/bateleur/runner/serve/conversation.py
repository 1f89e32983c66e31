"""A conversation in, events out: what chat completions, responses and messages share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from fastapi import Request

from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.errors import refusing
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.parsers.chat_format import AnswerReader, ChatTurn, turn_of, with_options
from bateleur.runner.serve.parsers.events import Content, End, Event, Reasoning, ToolCall
from bateleur.runner.serve.service import Service, joined
from bateleur.runner.serve.thinking_budget import ThinkingBudget
from bateleur.runner.serve.usage import Usage
from bateleur.runner.text.chat import ChatPrompt


@dataclass(frozen=True, slots=True)
class Report:
    """What is new of one continuation."""

    output: RequestOutput
    completion: CompletionOutput
    events: list[Event]

    @property
    def finish_reason(self) -> str | None:
        """Why the continuation ended; None while it goes on."""
        return next((each.finish_reason for each in self.events if isinstance(each, End)), None)


class Answer:
    """A conversation that the engine answers."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        turn: ChatTurn,
        outputs: AsyncGenerator[RequestOutput, None],
    ) -> None:
        """outputs: reports of the engine."""
        self.asked, self.usage = asked, Usage()
        self._service, self._turn, self._outputs = service, turn, outputs
        self._readers: dict[int, AnswerReader] = {}
        self._thoughts: dict[int, int] = {}
        self._answering: set[int] = set()
        self._thinks = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far of the reasoning, with the tag that ends it."""
        return sum(self._thoughts.values()) if self._thinks else 0

    async def reports(self) -> AsyncGenerator[Report, None]:
        """Every report of every continuation. To leave the generator aborts the request."""
        async with aclosing(self._outputs) as outputs:
            async for output in outputs:
                self.usage.count(output)
                for completion in output.outputs:
                    yield self._read(output, completion)

    async def whole(self, request: Request) -> list[Report]:
        """One report for each continuation, if the request does not stream. ClientDisconnect if the client leaves."""
        output = await self._service.unless_gone(joined(self._outputs), request)
        self.usage.count(output)
        return [self._read(output, completion) for completion in output.outputs]

    def _read(self, output: RequestOutput, completion: CompletionOutput) -> Report:
        first = completion.index not in self._readers
        if first:
            self._readers[completion.index] = self._turn.reader()
        events = self._readers[completion.index].read(completion)
        self._count_reasoning(completion, events)
        if not self.asked.include_reasoning:
            events = [each for each in events if not isinstance(each, Reasoning)]
        last = self.asked.messages[-1]
        if first and self.asked.echo and last["role"] == "assistant":
            events = [Content(last["content"]), *events]
        return Report(output, completion, events)

    def _count_reasoning(self, completion: CompletionOutput, events: list[Event]) -> None:
        index, ids = completion.index, completion.token_ids
        self._thinks = self._thinks or any(isinstance(each, Reasoning) for each in events)
        if index in self._answering:
            return
        ends = [i for i, token in enumerate(ids) if token == self._service.chat_format.reasoning_end_id]
        count = len(ids)
        if ends or any(isinstance(each, Content | ToolCall) for each in events):
            self._answering.add(index)
            count = ends[0] + 1 if ends else 0
        self._thoughts[index] = self._thoughts.get(index, 0) + count


async def prompt_of(service: Service, asked: ChatRequest) -> tuple[ChatRequest, ChatPrompt]:
    """The request with the server's options, and its prompt. HTTPException for one that the template refuses."""
    service.check_model(asked.model)
    asked = with_options(asked, service.config)
    with refusing(asked.names):
        long = service.is_long(len(repr((asked.messages, asked.tools))))
        (prompt,) = await service.llm.run_in_thread(
            lambda: asked.prompts_for(service.llm.llm.tokenizer), long=long
        )
    return asked, prompt


async def answer(service: Service, asked: ChatRequest, reply_id: str) -> Answer:
    """Begin to answer a conversation. HTTPException if that is not possible."""
    asked, prompt = await prompt_of(service, asked)
    with refusing(asked.names):
        turn = turn_of(service.chat_format, asked, prompt)
        budget = ThinkingBudget.of(service, asked, prompt, turn)
    if budget is not None:
        reader = await budget.submit(reply_id)
        return Answer(service, asked, turn, budget.outputs(reader, reply_id))
    asked = replace(asked, params=turn.params)
    reader = await service.submit([prompt], asked, reply_id)
    return Answer(service, asked, turn, service.outputs(reader))
