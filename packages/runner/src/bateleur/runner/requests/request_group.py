"""A prompt with its `n` continuations, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import CompletionOutput, RequestOutput, RequestOutputKind, TextTag
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A validated request as plain values, sent to other ranks. Every rank makes the same `RequestGroup` from it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    priority: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    """Seed of each continuation."""
    lora_request: LoRARequest | None


class ReportedState(NamedTuple):
    """What the caller has received of a continuation: counts, cumulative log probability, whether it ended."""

    num_tokens: int = 0
    num_characters: int = 0
    num_tags: int = 0
    logprob: float = 0.0
    """Sum over these tokens."""
    ended: bool = False


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One prompt and its `n` continuations. Each continuation is a request of the engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """For outputs only; requests have their own."""
    kind: RequestOutputKind
    members: list[Request]
    lora_request: LoRARequest | None = None
    """LoRA adapter of all members; None for the base model."""

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended and have their final text."""
        return all(each.output.text is not None for each in self.members)

    def admitted(self) -> AdmittedRequest:
        """Return the values from which other ranks make this group. It must not have run yet."""
        first = self.members[0]
        return AdmittedRequest(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            params=first.params,
            kind=self.kind,
            priority=first.priority,
            stop_token_ids=first.stop_token_ids,
            max_total_tokens=first.max_total_tokens,
            bad_words=first.bad_words,
            seeds=tuple(each.seed for each in self.members),
            lora_request=self.lora_request,
        )

    def output(self, reported: Sequence[ReportedState] = ()) -> tuple[RequestOutput, tuple[ReportedState, ...]]:
        """Return the output for the caller, and for each continuation the part that the caller then has.

        reported: the part of each continuation that the caller already has. With DELTA the output holds only new tokens
        and text, without continuations that have nothing new; outputs share the prompt's lists. Otherwise it holds
        everything, `reported` is not used, and the second result is ().
        """
        now: tuple[ReportedState, ...] = ()
        first = self.members[0]
        prompt_token_ids, prompt_logprobs = self.prompt_token_ids, first.output.prompt_logprobs
        if self.kind is RequestOutputKind.DELTA:
            before = reported or (ReportedState(),) * len(self.members)
            outputs = [_completion(each, past) for each, past in zip(self.members, before, strict=True)]
            now = tuple(_after(past, output) for past, output in zip(before, outputs, strict=True))
            outputs = [each for each, past, new in zip(outputs, before, now, strict=True) if new != past]
        else:
            outputs = [_completion(each, ReportedState()) for each in self.members]
            prompt_token_ids, prompt_logprobs = list(prompt_token_ids), list(prompt_logprobs)
        last_token_time = max(each.times.last_token_time for each in self.members)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=first.prefix.num_cached_tokens,
            cache_miss=first.prefix.cache_miss,
            num_preemptions=sum(each.num_preemptions for each in self.members),
            metrics=replace(first.times, last_token_time=last_token_time),
            kind=self.kind,
            prompt_logprobs=None if first.params.prompt_logprobs is None else prompt_logprobs,
        )
        return output, now


def _completion(request: Request, reported: ReportedState) -> CompletionOutput:
    """Return the output of one continuation that the caller has not received yet."""
    first, wanted = reported.num_tokens, request.params.logprobs is not None
    return CompletionOutput(
        index=request.output.index,
        text=_text(request, reported.num_characters),
        token_ids=request.output_token_ids[first:],
        cumulative_logprob=reported.logprob + sum(request.output.chosen_logprobs[first:]) if wanted else None,
        logprobs=request.output.logprobs[first:] if wanted else None,
        finish_reason=request.finish_reason,
        stop_reason=request.output.stop_reason,
        drafted=request.drafted[first:],
        tags=_tags(request, reported),
    )


def _text(request: Request, first: int) -> str:
    if request.output.text is not None:
        return request.output.text[first:]
    return "" if request.output.detokenizer is None else request.output.detokenizer.text_from(first)


def _tags(request: Request, reported: ReportedState) -> list[TextTag]:
    """Return new tags (such as <think>, one token each), with positions in the new text."""
    if request.output.detokenizer is None or not request.params.return_tags:
        return []
    before = reported.num_characters
    return [
        TextTag(tag.start - before, tag.end - before, tag.token_id)
        for tag in request.output.detokenizer.tags_from(reported.num_tags)
    ]


def _after(reported: ReportedState, output: CompletionOutput) -> ReportedState:
    return ReportedState(
        reported.num_tokens + len(output.token_ids),
        reported.num_characters + len(output.text),
        reported.num_tags + len(output.tags),
        output.cumulative_logprob or 0.0,
        output.finish_reason is not None,
    )
