"""What a caller asked for, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bateleur.runner.outputs import CompletionOutput, RequestOutput, RequestOutputKind, TextTag
from bateleur.runner.requests.request import Request


class Told(NamedTuple):
    """How much of a continuation the caller has been told."""

    num_tokens: int = 0
    num_characters: int = 0
    num_tags: int = 0
    logprob: float = 0.0
    """Sum over these tokens."""
    ended: bool = False


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One prompt and its continuations, each a request of the engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """For reports; nothing else is read from it here."""
    kind: RequestOutputKind
    members: list[Request]

    @property
    def finished(self) -> bool:
        """Whether all have ended, and have their final text."""
        return all(each.text is not None for each in self.members)

    def output(self, told: Sequence[Told] = ()) -> tuple[RequestOutput, tuple[Told, ...]]:
        """A report for a caller who was told this of each member, or nothing; and what he has been told then.

        With DELTA it takes time and memory of what is new (reports share what there is of the prompt), and leaves out
        members of which nothing is; else what was told makes no difference, and is nothing.
        """
        now: tuple[Told, ...] = ()
        prompt_token_ids, prompt_logprobs = self.prompt_token_ids, self.members[0].prompt_logprobs
        if self.kind is RequestOutputKind.DELTA:
            before = told or (Told(),) * len(self.members)
            outputs = [_completion(each, past) for each, past in zip(self.members, before, strict=True)]
            now = tuple(_after(past, output) for past, output in zip(before, outputs, strict=True))
            outputs = [each for each, past, new in zip(outputs, before, now, strict=True) if new != past]
        else:
            outputs = [_completion(each, Told()) for each in self.members]
            prompt_token_ids, prompt_logprobs = list(prompt_token_ids), list(prompt_logprobs)
        report = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.members[0].num_cached_tokens,
            cache_miss=self.members[0].cache_miss,
            num_preemptions=sum(each.num_preemptions for each in self.members),
            metrics=replace(
                self.members[0].times,
                last_token_time=max(each.times.last_token_time for each in self.members),
            ),
            kind=self.kind,
            prompt_logprobs=None if self.members[0].params.prompt_logprobs is None else prompt_logprobs,
        )
        return report, now


def _completion(request: Request, told: Told) -> CompletionOutput:
    """What a request has beyond what was told of it."""
    first, wanted = told.num_tokens, request.params.logprobs is not None
    return CompletionOutput(
        index=request.index,
        text=_text(request, told.num_characters),
        token_ids=request.output_token_ids[first:],
        cumulative_logprob=told.logprob + sum(request.chosen_logprobs[first:]) if wanted else None,
        logprobs=request.logprobs[first:] if wanted else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        drafted=request.drafted[first:],
        tags=_tags(request, told),
    )


def _text(request: Request, first: int) -> str:
    if request.text is not None:
        return request.text[first:]
    return "" if request.detokenizer is None else request.detokenizer.text_from(first)


def _tags(request: Request, told: Told) -> list[TextTag]:
    """Tags that were not reported yet, with places in the text that is reported with them."""
    if request.detokenizer is None or not request.params.return_tags:
        return []
    before = told.num_characters
    return [
        TextTag(tag.start - before, tag.end - before, tag.token_id)
        for tag in request.detokenizer.tags_from(told.num_tags)
    ]


def _after(told: Told, output: CompletionOutput) -> Told:
    return Told(
        told.num_tokens + len(output.token_ids),
        told.num_characters + len(output.text),
        told.num_tags + len(output.tags),
        output.cumulative_logprob or 0.0,
        output.finish_reason is not None,
    )
