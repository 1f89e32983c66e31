"""Answers to conversations as events, for chat completions, responses and messages, with a thinking budget."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import Request

from bateleur.runner.engine.input_processor import wrapped_seed
from bateleur.runner.engine_thread import OutputReader
from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput, TextTag
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.errors import http_errors
from bateleur.runner.serve.openai.replies import Usage, shown_events
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.openai.tools import is_strict
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.chat_format import PreparedChat, with_options
from bateleur.runner.serve.parsers.events import Content, Event, Reasoning, ToolCall
from bateleur.runner.serve.parsers.source import THINK_END
from bateleur.runner.serve.service import Service, merge_outputs
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.log_once import log_once

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """New output of one continuation (one of a request's `n` answers), and the events parsed from its text."""

    output: RequestOutput
    completion: CompletionOutput
    events: list[Event]


@dataclass(slots=True)
class Answer:
    """The answer to a conversation while the engine generates it: its request, engine outputs and token counts."""

    service: Service
    parsed: ChatRequest
    prepared: PreparedChat
    outputs: AsyncGenerator[RequestOutput, None]
    usage: Usage = field(default_factory=lambda: Usage(num_reasoning=0))
    _readers: dict[int, AnswerParser] = field(default_factory=dict)
    _num_reasoning: int = 0
    """Tokens before the answers of all continuations, with the end tags of their reasoning."""
    _answering: set[int] = field(default_factory=set)
    _has_reasoning: bool = False

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
        return Report(output, completion, shown_events(self.parsed, events, first=first))

    def _count_reasoning(self, completion: CompletionOutput, events: list[Event]) -> None:
        self._has_reasoning = self._has_reasoning or any(isinstance(each, Reasoning) for each in events)
        if completion.index in self._answering:
            return
        ids, end = completion.token_ids, self.service.chat_format.reasoning_end_id
        if end in ids or any(isinstance(each, Content | ToolCall) for each in events):
            self._answering.add(completion.index)
            ids = ids[: ids.index(end) + 1] if end in ids else []
        self._num_reasoning += len(ids)
        self.usage.num_reasoning = self._num_reasoning if self._has_reasoning else 0


async def render_prompt(service: Service, parsed: ChatRequest) -> tuple[ChatRequest, ChatPrompt]:
    """Return the request with the server's template options (`with_options`), and its prompt.

    Raises HTTPException for an unknown model, or if the chat template refuses the conversation.
    """
    service.adapter_of(parsed.model)
    parsed = with_options(parsed, service.config)
    with http_errors(parsed.names):
        too_long = service.exceeds_context(len(repr((parsed.messages, parsed.tools))))
        prompt = await service.llm.run_in_thread(lambda: parsed.prompt_for(service.llm.llm.tokenizer), long=too_long)
    return parsed, prompt


async def answer(service: Service, parsed: ChatRequest, reply_id: str) -> Answer:
    """Submit a conversation to the engine. Raises HTTPException if it is invalid or the queue is full.

    reply_id: id of the reply; ids of engine requests begin with it.
    """
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


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A chat request with at most `budget` reasoning tokens. At this limit, the end tag is added to the model's output.

    For each continuation, the engine runs one request for the reasoning and one for the answer. If the prompt does not
    open the reasoning (`opened`), a request of one token shows whether the model does. Sampling depends on the seed and
    the position, so an unused budget changes no token of a seeded request. Presence and frequency penalties are an
    exception: the reasoning is a part of the prompt of the answer, so they do not count it there. `begin` and `end`:
    token ids of the tags.
    """

    service: Service
    parsed: ChatRequest
    prompt: ChatPrompt
    params: SamplingParams
    budget: int
    opened: bool
    begin: int | None
    end: int
    """Ids of the tokens that begin and end the reasoning."""

    @classmethod
    def of(
        cls, service: Service, parsed: ChatRequest, prompt: ChatPrompt, prepared: PreparedChat
    ) -> ThinkingBudget | None:
        """Create the budget of a request. None if it sets no `thinking_token_budget`, if its answer has no reasoning
        (`PreparedChat.phase`), if max_tokens is at most the budget, or if the tag that ends reasoning is not one token.

        Raises ValueError in the last case if the prompt has opened the reasoning.
        """
        budget, params, opened = parsed.thinking_token_budget, prepared.params, prepared.phase == "opened"
        if budget is None or prepared.phase == "none":
            return None
        if (end := service.chat_format.reasoning_end_id) is None:
            reason = f"{THINK_END} is not a single token of this model"
            if opened:
                refuse("thinking_token_budget", budget, f"absent: {reason}")
            log_once(_log, f"thinking_token_budget is ignored: {reason}")
            return None
        service.check_counts(1, params)
        longest, kept = service.llm.llm.limits.max_model_len, params.truncate_prompt_tokens
        if kept == -1:  # a number, because the requests of the budget have smaller max_tokens
            kept = max(1, longest - (params.max_tokens or 1))
        num_prompt = min(len(prompt["prompt_token_ids"]), longest if kept is None else kept)
        left = max(1, longest - num_prompt)
        max_tokens = min(left, params.max_tokens or left)
        if max_tokens <= budget + (not opened):
            return None
        least = min(params.min_tokens, max_tokens)
        params = replace(params, truncate_prompt_tokens=kept, max_tokens=max_tokens, min_tokens=least)
        if params.seed is None:  # the first token may be sampled twice
            params = replace(params, seed=secrets.randbits(63))
        return cls(service, parsed, prompt, params, budget, opened, service.chat_format.reasoning_begin_id, end)

    async def submit(self, reply_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Submit all continuations. Returns their outputs, as those of one request."""
        assert self.params.seed is not None, "`of` sets it"
        one = replace(self, parsed=replace(self.parsed, params=replace(self.parsed.params, n=1)))
        readers: list[OutputReader] = []
        outputs = []
        try:
            for i in range(self.params.n):
                params = replace(self.params, n=1, seed=wrapped_seed(self.params.seed + i))
                choice, name = replace(one, params=params), f"{reply_id}-{i}" if i else reply_id
                readers.append(await choice._begin(name))
                outputs.append(choice._outputs(readers[-1], name))
        except BaseException:
            for reader in readers:
                self.service.llm.abort_unfinished(reader)
            raise
        return _as_continuations(outputs, f"{reply_id}-0")

    async def _begin(self, reply_id: str) -> OutputReader:
        """Submit the reasoning of one continuation, and return the reader of its outputs.

        If the prompt has not opened it, submit a request of one token, which may be the begin tag.
        """
        if self.opened:
            return await self._submit_reasoning(self.prompt, reply_id)
        params = replace(self.params, max_tokens=1, min_tokens=min(1, self.params.min_tokens))
        return await self._submit(self.prompt, params, reply_id, continued=False)

    async def _outputs(self, reader: OutputReader, reply_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of reasoning and answer as those of one request. reader: from `_begin`."""
        written: list[int] = []
        answer_follows, first, bounded = False, None, True
        if not self.opened:
            first = await merge_outputs(self.service.outputs(reader))
            (completion,) = first.outputs
            if completion.finish_reason == "abort":
                yield first
                return
            if bounded := completion.token_ids == [self.begin] and completion.finish_reason == "length":
                written, completion.finish_reason, first.finished = [*completion.token_ids], None, False
                yield first
                reader = await self._submit_reasoning(_extended_prompt(first, written), reply_id)
            else:
                reader = await self._submit(self.prompt, self.params, reply_id)
        async with aclosing(self.service.outputs(reader)) as reports:
            async for output in reports:
                if not bounded:  # an answer without reasoning
                    yield output
                    continue
                (completion,) = output.outputs
                if not self.budget and completion.token_ids != [self.end] and completion.finish_reason != "abort":
                    completion = output.outputs[0] = _without_tokens(completion)
                written += completion.token_ids
                if answer_follows := output.finished and self._answer_follows(completion, written):
                    self._close(completion, written)
                    output.finished = False
                first = first or output
                yield _as_one_request(output, first)
        if not answer_follows:
            return
        assert first is not None
        prompt = _extended_prompt(first, written)
        params, max_tokens = self.service.chat_format.prepare(self.parsed, prompt).params, self.params.max_tokens
        left = None if max_tokens is None else max_tokens - len(written)
        least = max(0, self.params.min_tokens - len(written))
        params = replace(params, seed=self.params.seed, max_tokens=left, min_tokens=least)
        answer_reader = await self._submit(prompt, _without_prompt(params), reply_id)
        async with aclosing(self.service.outputs(answer_reader)) as reports:
            async for output in reports:
                yield _as_one_request(output, first)

    async def _submit_reasoning(self, prompt: ChatPrompt, reply_id: str) -> OutputReader:
        stop = (*self.params.stop_token_ids, self.end)
        params = replace(self.params, max_tokens=max(1, self.budget), min_tokens=0, stop_token_ids=stop)
        if not self.opened:
            grammar = self.service.chat_format.prepare(self.parsed, prompt).params.structured_outputs
            params = replace(_without_prompt(params), structured_outputs=grammar)
        return await self._submit(prompt, params, reply_id, continued=not self.opened)

    async def _submit(
        self, prompt: ChatPrompt, params: SamplingParams, reply_id: str, *, continued: bool = True
    ) -> OutputReader:
        """Submit a request of the engine. continued: whether it is not the first one of its continuation, so that a
        full queue does not refuse it.
        """
        parsed = replace(self.parsed, params=params, stream=True)
        return await self.service.submit([prompt], parsed, reply_id, continued=continued)

    def _answer_follows(self, completion: CompletionOutput, written: list[int]) -> bool:
        """Return whether the reasoning ended by its end tag or the budget, and max_tokens leaves room for an answer.

        completion: last output of the reasoning. written: output tokens so far, including this output's.
        """
        room = self.params.max_tokens is None or len(written) + 1 < self.params.max_tokens
        ended = completion.finish_reason == "stop" and written[-1:] == [self.end]
        return room and (ended or completion.finish_reason == "length")

    def _close(self, completion: CompletionOutput, written: list[int]) -> None:
        """End the reasoning with its last output: unless the model wrote the end tag, append it to both arguments.

        written: output tokens so far, including this output's.
        """
        if written[-1:] != [self.end]:
            written.append(self.end)
            completion.token_ids.append(self.end)
            completion.drafted.append(False)
            if completion.logprobs is not None:
                completion.logprobs.append({self.end: Logprob(0.0, 1, THINK_END, THINK_END.encode())})
        special = self.end in self.service.chat_format.special_ids and self.params.skip_special_tokens
        text, at = "" if special else THINK_END, len(completion.text)
        completion.text += text
        completion.tags.append(TextTag(at, at + len(text), self.end))
        completion.finish_reason = completion.stop_reason = None


async def _as_continuations(
    outputs: Sequence[AsyncGenerator[RequestOutput, None]], request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of several requests as they come, renumbered as continuations of one request."""
    awaited = {asyncio.ensure_future(anext(each)): i for i, each in enumerate(outputs)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = awaited.pop(task)
                with suppress(StopAsyncIteration):
                    output = task.result()
                    output.request_id, output.outputs[0].index = request_id, i
                    yield output
                    awaited[asyncio.ensure_future(anext(outputs[i]))] = i
    finally:
        for task in awaited:
            task.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)
        for each in outputs:
            await each.aclose()


def _extended_prompt(first: RequestOutput, written: list[int]) -> ChatPrompt:
    return ChatPrompt(prompt=first.prompt or "", prompt_token_ids=[*first.prompt_token_ids, *written])


def _without_prompt(params: SamplingParams) -> SamplingParams:
    """Return parameters that neither truncate nor report the prompt again."""
    return replace(params, truncate_prompt_tokens=None, prompt_logprobs=None)


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """Return the completion without tokens, with finish reason `length`."""
    logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    return replace(completion, text="", token_ids=[], logprobs=logprobs, drafted=[], tags=[], finish_reason="length")


def _as_one_request(output: RequestOutput, first: RequestOutput) -> RequestOutput:
    """Set the prompt fields and start times of `output` to those of the first output."""
    for name in ("prompt", "prompt_token_ids", "num_cached_tokens", "prompt_logprobs"):
        setattr(output, name, getattr(first, name))
    output.metrics = replace(first.metrics, last_token_time=output.metrics.last_token_time)
    return output
