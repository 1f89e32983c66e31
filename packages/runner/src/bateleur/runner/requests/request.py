"""A request inside the engine, and the table of running requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from bateleur.metadata import BlockTable, expand_ranges
from bateleur.runner.outputs import FinishReason, Logprob, RequestTimes
from bateleur.runner.requests.prefix_keys import PrefixKeys
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.structured.matcher import Matcher
from bateleur.runner.text.detokenizer import IncrementalDetokenizer
from bateleur.runner.utils.arrays import Int32s, Int64s


@dataclass(slots=True, eq=False)
class OutputState:
    """Output of a request in addition to its tokens: text, log probabilities, and why it stopped.
    index: number of the continuation in its group. stream: whether each step reports the output. detokenizer: None
    unless text is needed token by token, for streaming or stop strings. text: final text; set when the request
    finishes. logprobs: shared with outputs. chosen_logprobs: log probabilities of the output tokens themselves.
    prompt_logprobs: entries of prompt tokens as far as they are known; None for the first token. num_scored: number of
    `prompt_logprobs`, including steps in flight.
    """

    index: int = 0
    stream: bool = False
    detokenizer: IncrementalDetokenizer | None = None
    text: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    chosen_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    num_scored: int = 1


@dataclass(slots=True, eq=False)
class PrefixState:
    """State of a request in the prefix cache.
    root: start of the chain of keys (prefix hashes): the digest of the LoRA adapter. keys: the prefix hashes, made when
    they are first needed. fetched: whether the prefix was requested from slower tiers. num_cached_tokens: cached prompt
    tokens when the request first got a table row. cache_miss: reason of a miss.
    """

    root: bytes = b""
    keys: PrefixKeys | None = None
    fetched: bool = False
    num_cached_tokens: int = 0
    cache_miss: str = ""


@dataclass(slots=True, eq=False)
class _OutputTokens:
    """Output tokens of a request. While it runs, its newest tokens are only in its row of `table`."""

    ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    times: RequestTimes = field(default_factory=lambda: RequestTimes(perf_counter()))
    table: RequestTable | None = None

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
    """A prompt, its parameters and its output so far. A step writes the tokens of all running requests to the request
    table at once. The lists here catch up when they are read.

    seed: seed of the sampling noise, together with the position of a token.
    stop_token_ids: end-of-sequence (unless ignored) and the request's own stop ids.
    max_total_tokens: maximum length of prompt and output together.
    rope_length: see `ModelSpec.rope_length`; equal for all running requests.
    adapter_slot: slot of its LoRA adapter, see `AdapterPool`; 0 for none, -1 while it waits for one.
    matcher: follows the grammar; None without one.
    leader: first request of the group, which has the same prompt; None in this request itself. With prefix caching, the
        others wait until it has computed the prompt.
    arrival: order of arrival, set by the scheduler. row: row of the request table; -1 while waiting.
    num_drafts: number of drafts that were proposed but not tested when the request was preempted. As many are proposed
        again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    rope_length: int = 0
    adapter_slot: int = 0
    matcher: Matcher | None = None
    leader: Request | None = None
    priority: int = 0
    arrival: int = 0
    row: int = -1
    num_preemptions: int = 0
    num_drafts: int = 0
    finish_reason: FinishReason | None = None
    prefix: PrefixState = field(default_factory=PrefixState)
    output: OutputState = field(default_factory=OutputState)
    _tokens: _OutputTokens = field(default_factory=_OutputTokens, init=False)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far; the list itself, not a copy."""
        return self._known.ids

    @property
    def drafted(self) -> list[bool]:
        """Whether each output token was a draft; the list itself, not a copy."""
        return self._known.drafted

    @property
    def times(self) -> RequestTimes:
        """Times of its events; the object itself, not a copy."""
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

    def enter(self, table: RequestTable, row: int) -> None:
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
        self.finish_reason = output.text = output.stop_reason = self.prefix.keys = None
        if output.detokenizer is not None:
            output.detokenizer.restart(self.prompt_token_ids, tokens.ids)
        if self.matcher is not None:
            self.matcher.restart(tokens.ids)


class RequestTable:
    """Host state of up to `max_num_seqs` running requests.

    A row belongs to a request from admission to finish, abort or preemption, and never moves in between. Arrays, all
    indexed by row, (rows,) int32 unless noted:

    * `token_ids` (rows, max_model_len): every known token, `num_known` of them. `Request` copies them when it is read;
    * `drafted` (rows, max_model_len) bool: whether a known token was a draft;
    * `last_token_time` (rows,) float64: time of the last token, 0 before the first;
    * `check_from`: length from which each token must be checked for the end of the request: `limit`, or 0 if each
      token must be checked because the request streams, or its text or grammar needs it;
    * `num_tokens`, `num_computed`: known tokens, and tokens whose state is in the caches. Both count the step in
      flight with all its drafts as accepted, so they are too high by at most `num_uncertain`;
    * `num_committed`: computed tokens of steps whose results are known;
    * `must_wait` (rows,) bool: whether the request skips steps that are planned while another one is in flight, because
      its tokens depend on the exact value of `num_tokens`;
    * `prompt_len`, `prefill_len`, `limit`: tokens of the prompt, tokens computed before the row decodes (more than the
      prompt after a preemption), and the length at which the request ends;
    * `num_proposed`: drafts after the last known token, which are on the device;
    * `num_drafts`, `num_draft_slots`: how many proposed drafts the next step tests, and tokens that it computes for
      them (more if rows are padded to one length). `Proposer.plan` writes both before each step is scheduled;
    * `num_blocks`: KV blocks in `block_table`, which is written through `blocks`.
    """

    num_tokens: Int32s
    num_computed: Int32s
    num_blocks: Int32s
    limit: Int32s
    prompt_len: Int32s
    prefill_len: Int32s
    num_drafts: Int32s
    num_draft_slots: Int32s
    num_committed: Int32s
    num_uncertain: Int32s
    num_known: Int32s
    check_from: Int32s
    num_proposed: Int32s

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.drafted = np.zeros((max_num_seqs, max_model_len), dtype=np.bool_)
        self.blocks = BlockTable(np.zeros((max_num_seqs, max_blocks), dtype=np.int32))
        self.last_token_time = np.zeros(max_num_seqs, dtype=np.float64)
        self.must_wait = np.zeros(max_num_seqs, dtype=np.bool_)
        for name in RequestTable.__annotations__:
            setattr(self, name, np.zeros(max_num_seqs, dtype=np.int32))
        self.clear()

    @property
    def block_table(self) -> Int32s:
        """KV blocks of each row, (rows, max_blocks), 0 for none."""
        return self.blocks.ids

    def clear(self) -> None:
        """Remove all requests from the table."""
        self.blocks.clear_all()
        self._reset(slice(None))
        self.free_rows = list(range(len(self.token_ids) - 1, -1, -1))

    def admit(self, request: Request) -> int:
        """Give the request a table row with its known tokens, none of them computed; returns the row."""
        row = self.free_rows.pop()
        count = request.num_tokens
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = self.num_known[row] = count
        # The last token is computed together with the drafts after it, as it would have been without the preemption.
        num_drafts = max(0, min(request.num_drafts, request.max_total_tokens - 1 - count))
        self.prefill_len[row] = count - (num_drafts > 0)
        self.num_proposed[row] = self.num_drafts[row] = self.num_draft_slots[row] = num_drafts
        self.prompt_len[row] = len(request.prompt_token_ids)
        self.limit[row] = request.max_total_tokens
        check_all = request.output.stream or request.output.detokenizer is not None or request.matcher is not None
        self.check_from[row] = 0 if check_all else request.max_total_tokens
        self.last_token_time[row] = request.times.last_token_time
        request.enter(self, row)
        return row

    def release(self, request: Request) -> list[int]:
        """Take the table row from the request; returns its KV blocks."""
        row = request.row
        request.leave()
        request.num_drafts, request.row = int(self.num_proposed[row]), -1
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.blocks.clear(row)
        self._reset(row)
        self.free_rows.append(row)
        return blocks

    def _reset(self, rows: int | slice) -> None:
        for name in RequestTable.__annotations__:
            getattr(self, name)[rows] = 0
        self.must_wait[rows] = False

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        """Append KV blocks to the block table of a row."""
        if blocks:
            self.append_blocks(np.array([row]), np.array([len(blocks)], np.int32), blocks)

    def append_blocks(self, rows: Int64s, counts: Int32s, blocks: list[int]) -> None:
        """Append KV blocks to several requests: `counts[i]` of `blocks`, in order, to the distinct row `rows[i]`."""
        owners, columns = expand_ranges(rows, self.num_blocks[rows], counts)
        self.blocks.write_cells(owners * self.block_table.shape[1] + columns, blocks)
        self.num_blocks[rows] += counts

    def num_useful_drafts(self, rows: Int64s, longest: int, most: int, *, at_least_one: bool) -> Int32s:
        """Return the number of drafts (R,), at most `most`, that each request's next step can use.
        longest: maximum sequence length, drafts included, for which drafts can be proposed. at_least_one: assume that a
        step in flight emits one token per request; otherwise, that all drafts are accepted.
        """
        left = np.minimum(self.limit[rows] - 1, longest) - self.num_tokens[rows]
        if at_least_one:
            left += self.num_uncertain[rows]
        return np.minimum(np.maximum(left, 0), most)
