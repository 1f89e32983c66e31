"""From sampled token ids to outputs: stop conditions, text, log probabilities, times of requests."""

# Shape letters: S rows that sample, J tokens of a row at most.

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.outputs import Logprob
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.sampling.logprobs import Logprobs, PendingPromptLogprobs
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats
from bateleur.runner.text.detokenizer import decode_all
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.arrays import Bools, Int64s

_CONTEXT = 3
"""Tokens before one that may hold the first bytes of its character."""
NO_NUMBERS = "the model's logits are not numbers (NaN)"
_NO_TOKEN = "no token is left that the request's own parameters allow"
_BAD = (None, NO_NUMBERS, _NO_TOKEN)


class EmittedTokens(NamedTuple):
    """Tokens that the S sampling requests of a step have emitted, on the host.
    num_taken: (S,) emitted tokens that each request keeps: up to its end. num_drafts, num_accepted: (S,) tested and
    accepted drafts. reports: requests that ended or stream.
    """

    num_taken: Int64s
    num_drafts: Int64s
    num_accepted: Int64s
    reports: list[Request]


class OutputProcessor:
    """Appends emitted tokens to requests, and ends requests.
    Vector arithmetic finds the requests that keep all their tokens and need nothing else: their tokens are only written
    to the request table. All other requests are processed one by one.
    logprobs: appends log probabilities.
    """

    def __init__(self, tokenizer: Tokenizer, table: RequestTable, vocab_size: int, stats: EngineStats) -> None:
        self._tokenizer, self._table, self._stats = tokenizer, table, stats
        self._token_text = TokenText(tokenizer)
        self.logprobs = LogprobsProcessor(self._token_text)
        self._stops = frozenset[int](), np.zeros(vocab_size + 1, np.bool_)
        """Tokens that end some running request, and the same as flags by token; the last one is for -1, no token."""

    def admit(self, admitted: Sequence[Request], running: Sequence[Request]) -> None:
        """Record start time and stop tokens of requests that just got a table row. running: all running requests."""
        now = perf_counter()
        for request in admitted:
            if not request.times.first_scheduled_time:
                request.times.first_scheduled_time = now
                self._stats.histograms.request_queue_time_seconds.observe(now - request.times.arrival_time)
        known, ends = self._stops
        if all(request.stop_token_ids <= known for request in admitted):
            return
        known, ends = frozenset().union(*(request.stop_token_ids for request in running)), np.zeros_like(ends)
        ends[list(known)] = True
        self._stops = known, ends

    def emit(self, step: StepInFlight, present: Bools | None) -> EmittedTokens:
        """Wait for the tokens of the S requests that sample, the only wait for the device in a step, and append them.
        present: (S,) whether each request still has its table row; None for all. An ended request has no row.
        Tokens after a stop are dropped, and all tokens of an ended request. A request whose logits have a NaN, or allow
        no token, ends with `finish_reason` "error".
        """
        assert step.fetched is not None
        packed, *logprobs = step.fetched.wait()
        requests, rows = step.batch.sampled
        num_emitted, bad, width = packed[:, 0], packed[:, 1], packed.shape[1] // 2
        tokens_SJ, drafts_SK = packed[:, 2 : 2 + width], packed[:, 2 + width :]
        taken, reports, table = num_emitted.copy(), list[Request](), self._table
        # Requests that may end, drop tokens, stream, or need text or grammar.
        special = table.num_known[rows] + num_emitted >= table.check_from[rows]
        special |= self._stops[1][tokens_SJ].any(1) | (bad > 0)
        if present is not None:
            special |= ~present
        for i in np.flatnonzero(special).tolist():
            request = requests[i]
            if request.finish_reason is not None:  # while the step was in flight
                taken[i] = 0
                continue
            taken[i] = self._append(request, tokens_SJ[i, : num_emitted[i]].tolist(), int(bad[i]))
            if request.finish_reason is not None or request.output.stream:
                reports.append(request)
        if logprobs:
            self.logprobs.append(requests, logprobs, step.batch.index.first_S, tokens_SJ, taken)
        if present is None:
            append_tokens(table, rows, tokens_SJ, taken)
        else:
            append_tokens(table, rows[present], tokens_SJ[present], taken[present])
        self._record_tokens(requests, rows, taken, present)
        return EmittedTokens(taken, (drafts_SK >= 0).cumprod(1).sum(1), num_emitted - (bad == 0), reports)

    def _append(self, request: Request, tokens: Sequence[int], bad: int) -> int:
        """Append tokens before the first -1, up to and including one that ends the request; return how many.
        All but the last token are accepted drafts. bad: if nonzero, no last token could be sampled, and the request
        ends with an error.
        """
        count, output = 0, request.output_token_ids
        for token in takewhile(lambda token: token >= 0, tokens):
            output.append(token)
            count += 1
            self._end(request, token)
            if request.finish_reason is not None:
                break
        num_drafts = len(tokens) - (not bad)
        request.drafted.extend(i < num_drafts for i in range(count))
        if bad and request.finish_reason is None:
            request.finish_reason = "error"
            request.output.stop_reason = (request.matcher and request.matcher.error) or _BAD[bad]
        return count

    def _end(self, request: Request, token: int) -> None:
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
            return
        ends_grammar = False
        if request.matcher is not None:
            request.matcher.accept(token)
            early = len(request.output_token_ids) < request.params.min_tokens
            ends_grammar = request.matcher.ended(without_end=early)
        if ends_grammar:
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

    def _record_tokens(
        self, requests: Sequence[Request], rows: Int64s, num_taken: Int64s, present: Bools | None
    ) -> None:
        """Record token times and latencies of S requests. rows: (S,) their table rows. num_taken: (S,) tokens that they
        got. present: (S,) whether they still have these rows; None: all.
        """
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

    def record_end(self, request: Request) -> None:
        """Record the end of a request. If it got no token, only its finish reason and lengths are recorded."""
        histograms, times = self._stats.histograms, request.times
        self._stats.finished[request.finish_reason or "abort"] += 1
        self._stats.num_cached_tokens += request.prefix.num_cached_tokens
        histograms.request_prompt_tokens.observe(len(request.prompt_token_ids))
        histograms.request_generation_tokens.observe(len(request.output_token_ids))
        if times.first_token_time:
            histograms.request_prefill_time_seconds.observe(times.first_token_time - times.first_scheduled_time)
            histograms.request_decode_time_seconds.observe(times.last_token_time - times.first_token_time)
            histograms.e2e_request_latency_seconds.observe(times.last_token_time - times.arrival_time)


def append_tokens(table: RequestTable, rows: Int64s, tokens_SJ: Int64s, counts_S: Int64s) -> None:
    """Append the first counts_S[i] tokens of tokens_SJ[i] to table row rows[i]; all but the last one are drafts."""
    position_J = np.arange(tokens_SJ.shape[1])
    left_SJ = counts_S[:, None] - position_J
    known_SJ = left_SJ > 0
    cells_N = ((rows * table.max_model_len + table.num_known[rows])[:, None] + position_J)[known_SJ]
    table.token_ids.reshape(-1)[cells_N] = tokens_SJ[known_SJ]
    table.drafted.reshape(-1)[cells_N] = left_SJ[known_SJ] > 1
    table.num_known[rows] += counts_S.astype(np.int32)


class LogprobsProcessor:
    """Appends log probabilities to requests."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def append(
        self,
        requests: Sequence[Request],
        logprobs: Sequence[NDArray[Any]],
        first_S: Int64s,
        tokens_SJ: Int64s,
        num_tokens_S: Int64s,
    ) -> None:
        """Append log probabilities to S requests: of the first `num_tokens_S[i]` tokens in row i of `tokens_SJ`.
        logprobs: fields of `Logprobs`. first_S: (S,) index of each request's first token in these fields.
        """
        lists: Any = Logprobs(*(each.tolist() for each in logprobs))
        for i, request in enumerate(requests):
            if (wanted := request.params.logprobs) is None:
                continue
            known = request.output_token_ids[: len(request.output.chosen_logprobs)]
            for index in range(int(num_tokens_S[i])):
                row = int(first_S[i]) + index
                before = [*request.prompt_token_ids[-_CONTEXT:], *known[-_CONTEXT:], *tokens_SJ[i, :index].tolist()]
                entry = self._entry(lists, row, int(tokens_SJ[i, index]), wanted, before, request.params.detokenize)
                request.output.logprobs.append(entry)
                request.output.chosen_logprobs.append(lists.sampled[row])

    def append_prompt(self, scored: PendingPromptLogprobs) -> None:
        """Wait for the prompt log probabilities of a step, and append them to their requests."""
        lists: Any = Logprobs(*(each.tolist() for each in scored.wait()))
        tokens, row = scored.token_ids.tolist(), 0
        for request, count in scored.requests:
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            for index in range(row, row + count) if request.finish_reason is None else ():
                known = len(request.output.prompt_logprobs)
                before = request.prompt_token_ids[max(0, known - _CONTEXT) : known]
                entry = self._entry(lists, index, tokens[index], wanted, before, request.params.detokenize)
                request.output.prompt_logprobs.append(entry)
            row += count

    def _entry(
        self, lists: Any, row: int, token: int, num_top: int, before: Sequence[int], detokenize: bool
    ) -> dict[int, Logprob]:
        """Return log probabilities at index `row` of `lists`: of `token`, and of the `num_top` most likely tokens.
        lists: `Logprobs` with lists in place of tensors. before: tokens before `token`, on which its text depends.
        """

        def logprob(token: int, value: float, rank: int) -> Logprob:
            if not detokenize:
                return Logprob(value, rank, None)
            text = self._token_text
            return Logprob(value, rank, text.added_text(before, token), text.bytes_of(token))

        entry = {token: logprob(token, lists.sampled[row], lists.rank[row])}
        for rank in range(num_top):
            other = lists.top_ids[row][rank]
            entry.setdefault(other, logprob(other, lists.top_values[row][rank], rank + 1))
        return entry
