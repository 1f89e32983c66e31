"""A prompt with its `n` continuations, and their output."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple

from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.outputs import CompletionOutput, RequestOutput, RequestOutputKind, TextTag
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling_params import SamplingParams


class ReportedState(NamedTuple):
    """Describes the output of a continuation that the caller has received: numbers of tokens, characters and
    tags in the text (`TextTag`), sum of the tokens' log probabilities, whether the continuation ended.
    """

    num_tokens: int = 0
    num_characters: int = 0
    num_tags: int = 0
    logprob: float = 0.0
    ended: bool = False


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A validated prompt and its `n` continuations. Each continuation is a request of the engine.
    It is pickled without `members`: each rank makes its own (`InputProcessor.follow`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """For outputs only; requests have their own."""
    params: SamplingParams
    kind: RequestOutputKind
    priority: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    lora_request: LoRARequest | None
    """LoRA adapter of all members; None for the base model."""
    members: list[Request] = field(default_factory=list)

    def __reduce__(self) -> tuple[partial["RequestGroup"], tuple[()]]:
        names = (each.name for each in fields(self) if each.name != "members")
        return partial(RequestGroup, **{name: getattr(self, name) for name in names}), ()

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended and have their final text."""
        return all(each.output.text is not None for each in self.members)

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
    first, wanted, state = reported.num_tokens, request.params.logprobs is not None, request.output
    text, tags, before = state.text, list[TextTag](), reported.num_characters
    if (detokenizer := state.detokenizer) is not None and request.params.return_tags:
        new = detokenizer.tags_from(reported.num_tags)
        tags = [TextTag(tag.start - before, tag.end - before, tag.token_id) for tag in new]
    if text is not None:
        text = text[before:]
    return CompletionOutput(
        index=state.index,
        text=text if text is not None else "" if detokenizer is None else detokenizer.text_from(before),
        token_ids=request.output_token_ids[first:],
        cumulative_logprob=reported.logprob + sum(state.chosen_logprobs[first:]) if wanted else None,
        logprobs=state.logprobs[first:] if wanted else None,
        finish_reason=request.finish_reason,
        stop_reason=state.stop_reason,
        drafted=request.drafted[first:],
        tags=tags,
    )


def _after(reported: ReportedState, output: CompletionOutput) -> ReportedState:
    return ReportedState(
        reported.num_tokens + len(output.token_ids),
        reported.num_characters + len(output.text),
        reported.num_tags + len(output.tags),
        output.cumulative_logprob or 0.0,
        output.finish_reason is not None,
    )
