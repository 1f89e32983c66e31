"""A request inside the engine: the host's side of it, one row of the table while it runs."""

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
    """Where a step writes the newest tokens of those that run: see `RequestTable`, which is one."""

    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    num_known: NDArray[np.int32]
    last_token_time: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters and what has been emitted so far.

    While it runs, its newest tokens and the time of the last are in its row of the table alone, where a step writes
    those of all rows at once; they come here when somebody asks.
    """

    request_id: str
    """Of the group that it belongs to."""
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Drives the noise of this request together with the token's position."""
    stop_token_ids: frozenset[int]
    """End-of-sequence (unless ignored) and the request's own stop ids."""
    max_total_tokens: int
    """Prompt and output together may not grow past this."""
    detokenizer: IncrementalDetokenizer | None
    """Present where text is needed token by token: streaming or stop strings."""
    stream: bool = False
    """Whether every step reports it, not only the last."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of what it may not write."""
    rope_length: int = 0
    """See `ModelSpec.rope_length`; requests that run at once have the same one."""
    matcher: Matcher | None = None
    """Where its text stands in the grammar that it must follow."""
    index: int = 0
    """Its number in the group."""
    leader: Request | None = None
    """Another of the group, whose prompt it waits for where prefixes are shared."""
    priority: int = 0
    """Lower goes first."""
    arrival: int = 0
    """Its number among all that came, from the scheduler."""
    row: int = -1
    """Row of the request table; -1 while waiting."""
    table: Rows | None = None
    """Where it has a row."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Shared with whoever has an output; nothing is read from them here."""
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    """Of the prompt's tokens as far as they are known, where they are asked for; nothing comes before the first."""
    num_scored: int = 1
    """Of these, with those of steps in flight."""
    chosen_logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    """Final text; set when the request finishes."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """Drafts that waited for their test when it was preempted: they are made again."""
    num_cached_tokens: int = 0
    """Tokens found in the caches when it first got a row."""
    cache_miss: str = ""
    """Why none were found, where prefixes are cached."""
    fetched: bool = False
    """Whether its prefix was looked for where reading takes a while."""
    keys: PrefixKeys | None = None
    """Names of its prefixes; made when they are first needed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _output: list[int] = field(default_factory=list, init=False)
    _drafted: list[bool] = field(default_factory=list, init=False)
    _times: RequestTimes = field(default_factory=lambda: RequestTimes(perf_counter()), init=False)

    @property
    def output_token_ids(self) -> list[int]:
        """What has been emitted so far; the list itself."""
        self._catch_up()
        return self._output

    @property
    def drafted(self) -> list[bool]:
        """By token of the output: it was a draft; the list itself."""
        self._catch_up()
        return self._drafted

    @property
    def times(self) -> RequestTimes:
        """When what happened; the object itself."""
        self._catch_up()
        return self._times

    @property
    def token_ids(self) -> list[int]:
        """Every token known so far: prompt, then output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some are asked for and not known yet. The first of a group knows them for all."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def leave(self) -> None:
        """Its row is no longer its own; what was known there of its past is here."""
        self._catch_up()
        self.table = None

    def _catch_up(self) -> None:
        """Take over what only its row knows. To be done again if it breaks off; each statement is done or not."""
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
        """Take back the tokens behind the first `num_output_tokens`, and the end that they came to."""
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
