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


class TokenTable(Protocol):
    """The columns of `RequestTable` that hold the newest tokens of running requests."""

    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    num_known: NDArray[np.int32]
    last_token_time: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class OutputState:
    """Output of a request in addition to its tokens: text, log probabilities, and why it stopped."""

    index: int = 0
    """Index of the request in its group."""
    stream: bool = False
    """Whether each step is reported."""
    detokenizer: IncrementalDetokenizer | None = None
    """None unless text is needed token by token, for streaming or stop strings."""
    text: str | None = None
    """Final text; set when the request finishes."""
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Shared with outputs."""
    chosen_logprobs: list[float] = field(default_factory=list)
    """Log probabilities of the output tokens themselves."""
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    """Entries of prompt tokens as far as they are known; None for the first token."""
    num_scored: int = 1
    """Number of `prompt_logprobs`, including steps in flight."""


@dataclass(slots=True, eq=False)
class PrefixState:
    """State of a request in the prefix cache."""

    root: bytes = b""
    """Start of the chain of keys: the digest of the LoRA adapter."""
    keys: PrefixKeys | None = None
    """Hashes of the prefixes, made when they are first needed."""
    fetched: bool = False
    """Whether the prefix was requested from slower tiers."""
    num_cached_tokens: int = 0
    """Cached prompt tokens when the request first got a row."""
    cache_miss: str = ""
    """Reason for a prefix cache miss."""


@dataclass(slots=True, eq=False)
class _OutputTokens:
    """Output tokens of a request. While it runs, its newest tokens are only in its row of `table`."""

    ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    times: RequestTimes = field(default_factory=lambda: RequestTimes(perf_counter()))
    table: TokenTable | None = None

    def catch_up(self, row: int, prompt_len: int) -> _OutputTokens:
        """Copy new tokens from the row, and return self. Can be repeated after an interruption."""
        if (table := self.table) is None:
            return self
        known = int(table.num_known[row])
        if (have := prompt_len + len(self.ids)) < known:
            self.ids += table.token_ids[row, have:known].tolist()
        if (have := prompt_len + len(self.drafted)) < known:
            self.drafted += table.drafted[row, have:known].tolist()
        if (then := float(table.last_token_time[row])) > self.times.last_token_time:
            self.times.last_token_time = then
        return self


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters and its output so far.

    A step writes the tokens of all running requests to the request table at once. The lists here catch up when they are
    read.
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of forbidden words."""
    rope_length: int = 0
    """See `ModelSpec.rope_length`; equal for all running requests."""
    adapter_slot: int = 0
    """Slot of its LoRA adapter, see `AdapterPool`; 0 for none, -1 while it waits for one."""
    matcher: Matcher | None = None
    """State of the grammar that it follows."""
    leader: Request | None = None
    """Member of the group for whose prompt it waits, with prefix sharing."""
    priority: int = 0
    """Lower numbers are served first."""
    arrival: int = 0
    """Order of arrival, set by the scheduler."""
    row: int = -1
    """Row of the request table; -1 while waiting."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """Untested drafts when it was preempted, which are proposed again."""
    finish_reason: FinishReason | None = None
    prefix: PrefixState = field(default_factory=PrefixState)
    output: OutputState = field(default_factory=OutputState)
    _tokens: _OutputTokens = field(default_factory=_OutputTokens, init=False)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far; the list itself."""
        return self._known.ids

    @property
    def drafted(self) -> list[bool]:
        """Whether each output token was a draft; the list itself."""
        return self._known.drafted

    @property
    def times(self) -> RequestTimes:
        """Times of its events; the object itself."""
        return self._known.times

    @property
    def _known(self) -> _OutputTokens:
        return self._tokens.catch_up(self.row, len(self.prompt_token_ids))

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
        """Whether prompt log probabilities are missing. Only the first member of a group computes them."""
        asked = self.params.prompt_logprobs is not None and self.output.index == 0
        return asked and len(self.output.prompt_logprobs) < len(self.prompt_token_ids)

    def enter(self, table: TokenTable, row: int) -> None:
        """Read tokens from row `row` of the request table from now on. The row must hold all tokens of the request."""
        self.row, self._tokens.table = row, table

    def leave(self) -> None:
        """Copy all tokens from its table row, before it loses the row."""
        self._known.table = None

    def rewind(self, num_output_tokens: int) -> None:
        """Drop all output tokens after the first `num_output_tokens`. The request then counts as unfinished."""
        tokens, output = self._known, self.output
        if tokens.table is not None:
            known = len(self.prompt_token_ids) + num_output_tokens
            tokens.table.num_known[self.row] = min(known, int(tokens.table.num_known[self.row]))
        for each in (tokens.ids, tokens.drafted, output.logprobs, output.chosen_logprobs):
            del each[num_output_tokens:]
        self.finish_reason = output.text = output.stop_reason = None
        if output.detokenizer is not None:
            output.detokenizer.restart(self.prompt_token_ids, tokens.ids)
        if self.matcher is not None:
            self.matcher.restart(tokens.ids)
