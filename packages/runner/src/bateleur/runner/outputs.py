"""What a request gives back. Names and shape are those that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestOutputKind(IntEnum):
    """What the reports of a request hold."""

    CUMULATIVE = 0
    """Each all that there is so far."""
    DELTA = 1
    """Each what came since the last one."""
    FINAL_ONLY = 2
    """There is one report, at the end."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token under the raw model distribution (before any processing)."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """What the token adds to the text: a character that several tokens write is added by the last of them. None without
    detokenization."""
    token_bytes: bytes = b""
    """The token itself, which may be a part of a character."""


class TextTag(NamedTuple):
    """A tag in a text, such as <think>, that the model wrote as one token."""

    start: int
    """Characters of the text before it."""
    end: int
    """Characters of the text before what follows it; `start` if the token is a special one and has no text."""
    token_id: int


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt: all of it, or with `RequestOutputKind.DELTA` what came since the last report."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the log probabilities of all tokens so far; None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token: the sampled token and the `logprobs` most likely ones."""
    finish_reason: FinishReason | None
    """None while running; `length`: max_tokens or max_model_len; `error`: see `stop_reason`."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it (None for end-of-sequence), or what went wrong."""
    drafted: list[bool] = field(default_factory=list)
    """Per token: it was a draft, which verification confirmed."""
    tags: list[TextTag] = field(default_factory=list)
    """Tags in `text`, in their order; empty unless `return_tags` was asked for."""

    def add(self, later: CompletionOutput) -> None:
        """Append what came after this."""
        before = len(self.text)
        self.tags += (TextTag(tag.start + before, tag.end + before, tag.token_id) for tag in later.tags)
        self.text += later.text
        self.token_ids += later.token_ids
        self.drafted += later.drafted
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of `time.perf_counter`; 0 for what has not."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    """The first step that had a part of it."""
    first_token_time: float = 0.0
    last_token_time: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: final from `generate`, growing from `stream` and `step`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens that were not computed because their cache was shared."""
    cache_miss: str
    """Why there were none; empty if there were, or if prefixes are not cached."""
    num_preemptions: int
    """How often the request lost its cache and was recomputed."""
    metrics: RequestTimes = field(default_factory=RequestTimes, compare=False)
    """When what happened; two outputs may be equal whenever they came."""
    kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, compare=False)
    """Whether it holds all that there is, or what came since the last report."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per token of the prompt: that token and the `prompt_logprobs` most likely ones; None for the first token, and
    for all of it unless they were asked for."""

    def add(self, later: RequestOutput) -> None:
        """Take in the next report of the same request, for whoever missed this one.

        Deltas are appended to each other, in time of the new one; else the later report takes the place of this.
        """
        mine = {each.index: each for each in self.outputs}
        for each in later.outputs:
            if self.kind is RequestOutputKind.DELTA and each.index in mine:
                mine[each.index].add(each)
            else:
                mine[each.index] = each
        self.outputs = [mine[index] for index in sorted(mine)]
        self.finished, self.num_preemptions = later.finished, later.num_preemptions
        self.metrics, self.prompt_logprobs = later.metrics, later.prompt_logprobs
        self.num_cached_tokens, self.cache_miss = later.num_cached_tokens, later.cache_miss
