"""From sampled token ids to outputs: stop conditions, text, times of requests."""

# Shape letters: S rows that sample, J tokens of a row at most.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.engine.logprobs_processor import LogprobsProcessor
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.detokenizer import decode_all
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer

NO_NUMBERS = "the model's logits are not numbers (NaN)"
_NO_TOKEN = "no token is left that the request's own parameters allow"
_BAD = (None, NO_NUMBERS, _NO_TOKEN)


class EmittedTokens(NamedTuple):
    """Tokens that the S sampling requests of a step have emitted, on the host."""

    num_taken: NDArray[np.int64]
    """(S,) emitted tokens that the request keeps: up to its end."""
    num_drafts: NDArray[np.int64]
    """(S,) tested drafts."""
    num_accepted: NDArray[np.int64]
    """(S,) accepted drafts."""
    reports: list[Request]
    """Requests that ended, and those that stream."""


class OutputProcessor:
    """Appends emitted tokens to requests, and ends requests.

    Vector arithmetic finds the requests that keep all their tokens and need nothing else: their tokens are only written
    to the request table. All other requests are processed one by one.

    clock: records the times of requests. logprobs: appends log probabilities.
    """

    def __init__(self, tokenizer: Tokenizer, table: RequestTable, vocab_size: int, stats: EngineStats) -> None:
        self._tokenizer, self._table = tokenizer, table
        self._token_text = TokenText(tokenizer)
        self.clock = RequestClock(stats, table)
        self.logprobs = LogprobsProcessor(self._token_text)
        self._stops = frozenset[int](), np.zeros(vocab_size + 1, np.bool_)
        """Tokens that end some running request, and the same as flags by token; the last one is for -1, no token."""

    def admit(self, admitted: Sequence[Request], running: Sequence[Request]) -> None:
        """Record start time and stop tokens of requests that just got a table row. running: all running requests."""
        self.clock.started(admitted)
        known, ends = self._stops
        if all(request.stop_token_ids <= known for request in admitted):
            return
        known, ends = frozenset().union(*(request.stop_token_ids for request in running)), np.zeros_like(ends)
        ends[list(known)] = True
        self._stops = known, ends

    def emit(self, step: StepInFlight, present: NDArray[np.bool_] | None) -> EmittedTokens:
        """Wait for the tokens of the S requests that sample, the only wait for the device in a step, and append them.

        present: (S,) whether each request still has its table row; None for all. An ended request has no row.

        Tokens after a stop are dropped, and all tokens of an ended request. A request whose logits have a NaN, or
        allow no token, ends with `finish_reason` "error".
        """
        assert step.output is not None
        assert step.fetched is not None
        output, (packed, *logprobs) = step.output, step.fetched.wait()
        requests, rows = step.batch.sampled
        num_emitted, bad, width = packed[:, 0], packed[:, 1], output.width
        tokens_SJ, drafts_SK = packed[:, 2 : 2 + width], packed[:, 2 + width :]
        taken, reports = num_emitted.copy(), list[Request]()
        for i in self._special_rows(rows, tokens_SJ, num_emitted, bad, present):
            request = requests[i]
            if request.finish_reason is not None:  # while the step was in flight
                taken[i] = 0
                continue
            tokens = tokens_SJ[i, : num_emitted[i]].tolist()
            if bad[i] or not _append(request, tokens):
                taken[i] = self._append_checked(request, tokens, int(bad[i]))
            if request.finish_reason is not None or request.output.stream:
                reports.append(request)
        if logprobs:
            self.logprobs.append(requests, logprobs, output.first_logits, tokens_SJ, taken)
        if present is None:
            append_tokens(self._table, rows, tokens_SJ, taken)
        else:
            append_tokens(self._table, rows[present], tokens_SJ[present], taken[present])
        self.clock.emitted(requests, rows, taken, present)
        return EmittedTokens(taken, (drafts_SK >= 0).cumprod(1).sum(1), np.maximum(num_emitted - 1, 0), reports)

    def _special_rows(
        self,
        rows: NDArray[np.int64],
        tokens_SJ: NDArray[np.int64],
        num_emitted: NDArray[np.int64],
        bad: NDArray[np.int64],
        present: NDArray[np.bool_] | None,
    ) -> list[int]:
        """Return the requests (indices into S) that may end, drop tokens, stream, or need text or grammar.

        bad: nonzero if no token could be sampled. present: (S,) whether a request still has its row; None for all.
        """
        table = self._table
        special = table.num_known[rows] + num_emitted >= table.check_from[rows]
        special |= self._stops[1][tokens_SJ].any(1) | (bad > 0)
        if present is not None:
            special |= ~present
        return np.flatnonzero(special).tolist()

    def _append_checked(self, request: Request, tokens: Sequence[int], bad: int) -> int:
        """Append tokens that may end the request; return the number appended. bad: if nonzero, end with an error."""
        # All but the last token are accepted drafts; after bad logits there is no last token.
        count = self._apply(request, tokens, len(tokens) - (not bad))
        if bad and request.finish_reason is None:
            request.finish_reason = "error"
            request.output.stop_reason = (request.matcher and request.matcher.error) or _BAD[bad]
        return count

    def _apply(self, request: Request, tokens: Sequence[int], num_drafts: int) -> int:
        """Append tokens before the first -1, up to and including one that ends the request. Return the number appended.

        The first `num_drafts` tokens were drafts.
        """
        count, output = 0, request.output_token_ids
        for token in tokens:
            if token < 0:
                break
            output.append(token)
            count += 1
            self._end(request, token)
            if request.finish_reason is not None:
                break
        request.drafted.extend(i < num_drafts for i in range(count))
        return count

    def _end(self, request: Request, token: int) -> None:
        """End the request if its last token ends it."""
        stops, detokenizer = token in request.stop_token_ids, request.output.detokenizer
        # A stop token is not part of the text, unless `include_stop_str_in_output` is set.
        if detokenizer is not None and (not stops or request.params.include_stop_str_in_output):
            detokenizer.push(token)
            if detokenizer.stopped is not None and not stops:
                request.finish_reason, request.output.stop_reason = "stop", detokenizer.stopped
                return
        if stops:
            request.finish_reason = "stop"
            request.output.stop_reason = self._stop_reason(request.params, token)
        elif _ends_grammar(request, token):
            request.finish_reason = "stop"
        elif len(request.prompt_token_ids) + len(request.output_token_ids) >= request.max_total_tokens:
            request.finish_reason = "length"

    def _stop_reason(self, params: SamplingParams, token: int) -> int | str | None:
        """Return the `stop_reason` for a stop token: its id, its stop string, or None for end-of-sequence."""
        if token in params.stop_token_ids:
            return token
        return text if params.stop and (text := self._token_text.text_of(token)) in params.stop else None

    def close(self, request: Request) -> None:
        """Set the final text of an ended request."""
        if request.output.detokenizer is not None:
            request.output.detokenizer.finish()
            request.output.text = request.output.detokenizer.text
            return
        ids, params = request.output_token_ids, request.params
        ended = request.finish_reason == "stop" and ids[-1] in request.stop_token_ids
        if ended and not params.include_stop_str_in_output:
            ids = ids[:-1]
        skip, text = params.skip_special_tokens, ""
        if params.detokenize:
            text = decode_all(self._tokenizer, ids, request.prompt_token_ids, skip_special_tokens=skip)
        request.output.text = text


def _append(request: Request, tokens: list[int]) -> bool:
    """If none of the tokens can end the request, and it needs no text or grammar, append them and return True."""
    output, drafted = request.output_token_ids, request.drafted
    if not tokens or request.output.detokenizer is not None or request.matcher is not None:
        return False
    if len(request.prompt_token_ids) + len(output) + len(tokens) >= request.max_total_tokens:
        return False
    if not request.stop_token_ids.isdisjoint(tokens):
        return False
    output += tokens
    drafted += [True] * (len(tokens) - 1)
    drafted.append(False)
    return True


def _ends_grammar(request: Request, token: int) -> bool:
    """Advance the grammar of a request by a token that is no stop token; return whether the grammar is complete."""
    if request.matcher is None:
        return False
    request.matcher.accept(token)
    return request.matcher.ended(without_end=len(request.output_token_ids) < request.params.min_tokens)


def append_tokens(
    table: RequestTable, rows: NDArray[np.int64], tokens_SJ: NDArray[np.int64], counts_S: NDArray[np.int64]
) -> None:
    """Append the first counts_S[i] tokens of row i of `tokens_SJ` to table row rows[i]; all but the last are drafts."""
    position_J = np.arange(tokens_SJ.shape[1])
    left_SJ = counts_S[:, None] - position_J
    known_SJ = left_SJ > 0
    cells_N = ((rows * table.max_model_len + table.num_known[rows])[:, None] + position_J)[known_SJ]
    table.token_ids.reshape(-1)[cells_N] = tokens_SJ[known_SJ]
    table.drafted.reshape(-1)[cells_N] = left_SJ[known_SJ] > 1
    table.num_known[rows] += counts_S.astype(np.int32)


class RequestClock:
    """Records the times of requests, and their latencies in `EngineStats`."""

    def __init__(self, stats: EngineStats, table: RequestTable) -> None:
        self._stats, self._table = stats, table

    def started(self, requests: Iterable[Request]) -> None:
        """Record the start of requests in their first step."""
        now = perf_counter()
        for request in requests:
            if not request.times.first_scheduled_time:
                request.times.first_scheduled_time = now
                self._stats.histograms.request_queue_time_seconds.observe(now - request.times.arrival_time)

    def emitted(
        self,
        requests: Sequence[Request],
        rows: NDArray[np.int64],
        num_taken: NDArray[np.int64],
        present: NDArray[np.bool_] | None,
    ) -> None:
        """Record that requests got `num_taken` (S,) tokens. present: (S,) whether they still have rows; None: all."""
        now, has_tokens = perf_counter(), num_taken > 0
        then = self._table.last_token_time[rows]
        if present is not None:
            for i in (has_tokens & ~present).nonzero()[0].tolist():
                times = requests[i].times
                then[i], times.last_token_time = times.last_token_time, now
        for i in (has_tokens & (then == 0)).nonzero()[0].tolist():
            times = requests[i].times
            times.first_token_time = now
            self._stats.histograms.time_to_first_token_seconds.observe(now - times.arrival_time)
        again = has_tokens & (then > 0)
        gaps, counts = now - then[again], num_taken[again]
        self._stats.histograms.inter_token_latency_seconds.observe_all(gaps / counts, counts)
        self._table.last_token_time[rows[has_tokens if present is None else has_tokens & present]] = now

    def ended(self, request: Request) -> None:
        """Record the end of a request. If it got no token, only its finish reason and lengths are recorded."""
        histograms, times = self._stats.histograms, request.times
        self._stats.finished[request.finish_reason or "abort"] += 1
        histograms.request_prompt_tokens.observe(len(request.prompt_token_ids))
        histograms.request_generation_tokens.observe(len(request.output_token_ids))
        if times.first_token_time:
            histograms.request_prefill_time_seconds.observe(times.first_token_time - times.first_scheduled_time)
            histograms.request_decode_time_seconds.observe(times.last_token_time - times.first_token_time)
            histograms.e2e_request_latency_seconds.observe(times.last_token_time - times.arrival_time)
