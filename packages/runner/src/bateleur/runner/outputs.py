"""Outputs of requests, with vLLM's names and fields."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple, Self

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestOutputKind(IntEnum):
    """Contents of each output of a request."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Everything, in a single output at the end."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token under the model's raw distribution, before any processing."""

    logprob: float
    rank: int
    """1 for the most likely token; of a token of `logprob_token_ids`, its place in that list, as in vLLM."""
    decoded_token: str | None
    """Text of the token; a character of several tokens belongs to the last of them. None without detokenization."""
    token_bytes: bytes = b""
    """Bytes of the token, which may be a part of a character."""


class TextTag(NamedTuple):
    """A tag in `CompletionOutput.text`, such as <think>, that the model generated as one token.

    start, end: indices of its first character and of the one after it, in the text of the same output (or delta).
    """

    start: int
    """Index of the tag's first character in the text."""
    end: int
    """Index of the first character after the tag; `start` if the token is a special token without text."""
    token_id: int


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt (one of its `n` outputs); with `RequestOutputKind.DELTA` only the new part.
    drafted: for each token, whether it was an accepted draft. tags: tags in the text, see `TextTag`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the log probabilities of all tokens so far; None unless `logprobs` was requested."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token: the sampled token and the `logprobs` most likely ones."""
    finish_reason: FinishReason | None
    """None while the request runs; "length": max_tokens or max_model_len is reached; "error": see `stop_reason`."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended the text (None for end-of-sequence), or the error message."""
    drafted: list[bool] = field(default_factory=list)
    tags: list[TextTag] = field(default_factory=list)
    """In order; empty unless `return_tags` was requested."""

    def add(self, later: Self) -> None:
        """Append the next delta of the same continuation."""
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
    """Times of a request in seconds of `time.perf_counter`; 0 for events that have not happened yet."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    """Start of the first step with tokens of the request."""
    first_token_time: float = 0.0
    last_token_time: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """The output of a request: final from `generate`, intermediate from `stream` and `step`.
    cache_miss: why `num_cached_tokens` (prompt tokens found in the prefix cache) is 0; empty if it is not, or without
    prefix caching. kind: whether `outputs` hold everything so far, or what is new.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    cache_miss: str
    num_preemptions: int
    """How often the request was preempted and recomputed."""
    metrics: RequestTimes = field(default_factory=RequestTimes, compare=False)
    """Times of the request; equality ignores them."""
    kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, compare=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token: that token and the `prompt_logprobs` most likely ones. The first entry is None. None unless
    requested."""

    def add(self, later: Self) -> None:
        """Merge the next output of the same request: append deltas, replace all other outputs."""
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
