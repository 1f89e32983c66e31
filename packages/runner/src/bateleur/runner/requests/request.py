"""A request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.outputs import FinishReason, Logprob, RequestTimes
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.structured.matcher import Matcher
from bateleur.runner.text.detokenizer import IncrementalDetokenizer


class Rows(Protocol):
    """Interface of the columns of `RequestTable` that hold the newest tokens of running requests."""

    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    num_known: NDArray[np.int32]
    last_token_time: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters and its output so far.

    While the request runs, its newest tokens are only in its row of the request table, because a step writes all rows
    at once. The lists here are updated when they are read.
    """

    request_id: str
    """Id of its group."""
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Seed of its noise, together with the position of a token."""
    stop_token_ids: frozenset[int]
    """End-of-sequence (unless ignored) and the request's own stop ids."""
    max_total_tokens: int
    """Prompt and output together may not grow past this."""
    detokenizer: IncrementalDetokenizer | None
    """None unless text is needed token by token, for streaming or stop strings."""
    stream: bool = False
    """Whether each of its steps is reported."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of forbidden words."""
    rope_length: int = 0
    """See `ModelSpec.rope_length`; equal for all running requests."""
    adapter_slot: int = 0
    """Slot of its LoRA adapter, see `AdapterPool`; 0 for none. Set when it is queued."""
    adapter_digest: bytes = b""
    """Digest of its LoRA adapter, with which the keys of its prefixes start."""
    matcher: Matcher | None = None
    """State of the grammar that it follows."""
    index: int = 0
    """Index in its group."""
    leader: Request | None = None
    """Member of the group for whose prompt it waits, with prefix sharing."""
    priority: int = 0
    """Lower numbers are served first."""
    arrival: int = 0
    """Order of arrival, set by the scheduler."""
    row: int = -1
    """Row of the request table; -1 while waiting."""
    table: Rows | None = None
    """The table that holds its row."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Shared with outputs."""
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    """Entries of prompt tokens as far as they are known; None for the first token."""
    num_scored: int = 1
    """Number of `prompt_logprobs`, including steps in flight."""
    chosen_logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    """Final text; set when the request finishes."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """Untested drafts when it was preempted, which are proposed again."""
    num_cached_tokens: int = 0
    """Cached prompt tokens when it first got a row."""
    cache_miss: str = ""
    """Reason for a prefix cache miss."""
    fetched: bool = False
    """Whether its prefix was requested from slower tiers."""
    keys: PrefixKeys | None = None
    """Hashes of its prefixes, made when they are first needed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _output: list[int] = field(default_factory=list, init=False)
    _drafted: list[bool] = field(default_factory=list, init=False)
    _times: RequestTimes = field(default_factory=lambda: RequestTimes(perf_counter()), init=False)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far: the list itself, not a copy."""
        self._catch_up()
        return self._output

    @property
    def drafted(self) -> list[bool]:
        """Whether each output token was an accepted draft: the list itself, not a copy."""
        self._catch_up()
        return self._drafted

    @property
    def times(self) -> RequestTimes:
        """Times of the request's events: the object itself, not a copy."""
        self._catch_up()
        return self._times

    @property
    def token_ids(self) -> list[int]:
        """All tokens known so far: prompt, then output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities are missing. Only the first request of a group computes them."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def leave(self) -> None:
        """Copy the newest tokens from the request's table row, before it loses the row."""
        self._catch_up()
        self.table = None

    def _catch_up(self) -> None:
        """Copy new tokens from the request's table row. Can be repeated after an interruption."""
        table, row = self.table, self.row
        if table is None:
            return
        prompt_len, known = len(self.prompt_token_ids), int(table.num_known[row])
        if (have := prompt_len + len(self._output)) < known:
            self._output += table.token_ids[row, have:known].tolist()
        if (have := prompt_len + len(self._drafted)) < known:
            self._drafted += table.drafted[row, have:known].tolist()
        if (then := float(table.last_token_time[row])) > self._times.last_token_time:
            self._times.last_token_time = then

    def rewind(self, num_output_tokens: int) -> None:
        """Drop the output tokens after the first `num_output_tokens`, and undo the end of the request."""
        if self.table is not None:
            known = len(self.prompt_token_ids) + num_output_tokens
            self.table.num_known[self.row] = min(known, int(self.table.num_known[self.row]))
        del self.output_token_ids[num_output_tokens:]
        del self.logprobs[num_output_tokens:]
        del self.chosen_logprobs[num_output_tokens:]
        del self.drafted[num_output_tokens:]
        self.text = self.finish_reason = self.stop_reason = None
        if self.detokenizer is not None:
            self.detokenizer.restart(self.prompt_token_ids, self.output_token_ids)
        if self.matcher is not None:
            self.matcher.restart(self.output_token_ids)
