"""Reasoning of at most so many tokens: the tag that ends it is written for the model, which then answers.

The engine runs two requests, one up to the end of the reasoning and one behind it. Draws depend on the seed and the
position, so a budget that is not used up changes no token of a request with a seed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from bateleur.runner.engine_thread import Reader
from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput, TextTag
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.requests import ChatRequest
from bateleur.runner.serve.parsers.chat_format import ChatTurn, turn_of
from bateleur.runner.serve.parsers.think import Think
from bateleur.runner.serve.service import Service
from bateleur.runner.text.chat import ChatPrompt
from bateleur.runner.utils.arguments import refuse


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """One request whose reasoning is bounded."""

    service: Service
    asked: ChatRequest
    prompt: ChatPrompt
    params: SamplingParams
    """Of the whole request."""
    budget: int
    end: int
    """The token that ends the reasoning."""

    @classmethod
    def of(
        cls, service: Service, asked: ChatRequest, prompt: ChatPrompt, turn: ChatTurn
    ) -> ThinkingBudget | None:
        """None if nothing is to be bounded: no budget, one that is not below `max_tokens`, or no open reasoning."""
        budget, most = asked.thinking_token_budget, turn.params.max_tokens
        if budget is None or (most is not None and budget >= most) or not turn.begins_in_reasoning:
            return None
        end = service.chat_format.reasoning_end_id
        if end is None:
            rule = f"absent: {Think.END} is no single token of this model"
            refuse("thinking_token_budget", budget, rule)
        if turn.params.n > 1:
            refuse("thinking_token_budget", budget, f"absent with n = {turn.params.n}")
        return cls(service, asked, prompt, turn.params, budget, end)

    async def submit(self, reply_id: str) -> Reader:
        """Queue the reasoning."""
        params = replace(
            self.params,
            max_tokens=max(1, self.budget),
            min_tokens=0,
            stop_token_ids=(*self.params.stop_token_ids, self.end),
        )
        return await self._submit(self.prompt, params, reply_id)

    async def outputs(self, reader: Reader, reply_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Reports of the reasoning and the answer, as if they were one request."""
        written: list[int] = []
        async with aclosing(self.service.outputs(reader)) as reports:
            async for output in reports:
                (completion,) = output.outputs
                written += completion.token_ids
                if goes_on := output.finished and self._goes_on(completion, written):
                    self._close(completion, written)
                    output.finished = False
                yield output
        if not goes_on:
            return
        used, most = len(written), self.params.max_tokens
        prompt = ChatPrompt(
            prompt=self.prompt["prompt"], prompt_token_ids=[*self.prompt["prompt_token_ids"], *written]
        )
        turn = turn_of(self.service.chat_format, self.asked, prompt)
        least = max(0, self.params.min_tokens - used)
        params = replace(turn.params, max_tokens=None if most is None else most - used, min_tokens=least)
        later = await self._submit(prompt, params, reply_id)
        async with aclosing(self.service.outputs(later)) as reports:
            async for each in reports:
                each.prompt, each.prompt_token_ids = output.prompt, output.prompt_token_ids
                each.num_cached_tokens, each.prompt_logprobs = (
                    output.num_cached_tokens,
                    output.prompt_logprobs,
                )
                yield each

    async def _submit(self, prompt: ChatPrompt, params: SamplingParams, reply_id: str) -> Reader:
        return await self.service.submit([prompt], replace(self.asked, params=params, stream=True), reply_id)

    def _goes_on(self, completion: CompletionOutput, written: list[int]) -> bool:
        """Whether the reasoning ended, by itself or by its budget, and not the whole answer."""
        room = self.params.max_tokens is None or len(written) + 1 < self.params.max_tokens
        ended = completion.finish_reason == "stop" and written[-1:] == [self.end]
        return room and (ended or completion.finish_reason == "length")

    def _close(self, completion: CompletionOutput, written: list[int]) -> None:
        """End the reasoning at the end of this report, by the tag that the model wrote or by one that is added."""
        if written[-1] != self.end:
            written.append(self.end)
            completion.token_ids.append(self.end)
            completion.drafted.append(False)
            if completion.logprobs is not None:
                completion.logprobs.append({self.end: Logprob(0.0, 1, Think.END, Think.END.encode())})
        special = self.end in self.service.chat_format.special_ids and self.params.skip_special_tokens
        text, at = "" if special else Think.END, len(completion.text)
        completion.text += text
        completion.tags.append(TextTag(at, at + len(text), self.end))
        completion.finish_reason = completion.stop_reason = None
