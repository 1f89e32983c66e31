"""What a request gives back. Names and shape are those that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token under the raw model distribution (before any processing)."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the sampled tokens' log probabilities; None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token: the sampled token and the `logprobs` most likely ones."""
    finish_reason: FinishReason | None
    """None while running; `length`: max_tokens or max_model_len; `error`: see `stop_reason`."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it (None for end-of-sequence), or what went wrong."""


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of `time.perf_counter`; 0 for what has not."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    """The first step that had a part of it."""
    first_token_time: float = 0.0
    last_token_time: float = 0.0


@dataclass(frozen=True, slots=True)
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
