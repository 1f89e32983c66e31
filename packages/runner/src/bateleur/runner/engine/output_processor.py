"""From sampled token ids to outputs: stop conditions, log probabilities, text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.outputs import Logprob
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.prompt_logprobs import Scored
from bateleur.runner.sampling.rejection_sampler import SamplerOutput
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.text.detokenizer import decode_all
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.device import Fetch

NO_NUMBERS = "the model's logits are not numbers (NaN)"
_NO_TOKEN = "no token is left that the request's own parameters allow"
_CONTEXT = 3
"""Tokens before one that may hold the first bytes of its character."""
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


class _LogprobLists(NamedTuple):
    """The tensors of `Logprobs` as lists."""

    top_ids: list[list[int]]
    top_values: list[list[float]]
    sampled: list[float]
    rank: list[int]


class OutputProcessor:
    """Appends emitted tokens to requests, and ends requests.

    Vector arithmetic finds the requests that keep all their tokens and have no other work. Their tokens are only
    written to the request table. All other requests are processed one by one.
    """

    def __init__(self, tokenizer: Tokenizer, table: RequestTable, vocab_size: int) -> None:
        self._tokenizer, self._table = tokenizer, table
        self._token_text = TokenText(tokenizer)
        self._stops = frozenset[int](), np.zeros(vocab_size + 1, np.bool_)
        """Tokens that end some running request, and the same as flags by token; the last one is for -1, no token."""

    def admit(self, admitted: Sequence[Request], running: Sequence[Request]) -> None:
        """Record the stop tokens of requests that just got their table rows."""
        known, ends = self._stops
        if all(request.stop_token_ids <= known for request in admitted):
            return
        known, ends = frozenset().union(*(request.stop_token_ids for request in running)), np.zeros_like(ends)
        ends[list(known)] = True
        self._stops = known, ends

    def emit(
        self, batch: StepBatch, output: SamplerOutput, fetched: Fetch, present: NDArray[np.bool_] | None
    ) -> EmittedTokens:
        """Wait for the tokens of the step's S sampling requests, and append them.

        A step waits for the device only here.
        fetched: `output.packed`, then the log probabilities. present: (S,) whether the request still has its table row;
        None for all. An ended request has no row.

        Tokens after a stop are dropped, and all tokens of an ended request. A request whose logits held a NaN, or
        allowed no token, emits no token there. It ends with `finish_reason` "error".
        """
        packed, *logprobs = fetched.wait()
        requests, rows = batch.sampled
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
            if request.finish_reason is not None or request.stream:
                reports.append(request)
        if logprobs:
            self._add_logprobs(requests, logprobs, output.first_logits, tokens_SJ, taken)
        if present is None:
            self._table.append_tokens(rows, tokens_SJ, taken)
        else:
            self._table.append_tokens(rows[present], tokens_SJ[present], taken[present])
        return EmittedTokens(taken, (drafts_SK >= 0).cumprod(1).sum(1), np.maximum(num_emitted - 1, 0), reports)

    def _special_rows(
        self,
        rows: NDArray[np.int64],
        tokens_SJ: NDArray[np.int64],
        num_emitted: NDArray[np.int64],
        bad: NDArray[np.int64],
        present: NDArray[np.bool_] | None,
    ) -> list[int]:
        """Return the requests (indices into S) that may keep fewer tokens than were emitted, or have other work."""
        table = self._table
        special = table.num_known[rows] + num_emitted >= table.check_from[rows]
        special |= self._stops[1][tokens_SJ].any(1) | (bad > 0)
        if present is not None:
            special |= ~present
        return np.flatnonzero(special).tolist()

    def _append_checked(self, request: Request, tokens: Sequence[int], bad: int) -> int:
        """Append tokens that may end the request; returns how many. Bad logits end it with an error."""
        # All but the last token are accepted drafts; after bad logits there is no last token.
        count = self._apply(request, tokens, len(tokens) - (not bad))
        if bad and request.finish_reason is None:
            request.finish_reason = "error"
            request.stop_reason = (request.matcher and request.matcher.error) or _BAD[bad]
        return count

    def _apply(self, request: Request, tokens: Sequence[int], num_drafts: int) -> int:
        """Append tokens until one ends the request or is -1; returns how many. The first `num_drafts` were drafts."""
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
        """End the request if its last token is a stop token or completes a stop string."""
        stops, detokenizer = token in request.stop_token_ids, request.detokenizer
        # A stop token is not part of the text, unless `include_stop_str_in_output` is set.
        if detokenizer is not None and (not stops or request.params.include_stop_str_in_output):
            detokenizer.push(token)
            if detokenizer.stopped is not None and not stops:
                request.finish_reason, request.stop_reason = "stop", detokenizer.stopped
                return
        if stops:
            request.finish_reason = "stop"
            request.stop_reason = self._stop_reason(request.params, token)
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
        if request.detokenizer is not None:
            request.detokenizer.finish()
            request.text = request.detokenizer.text
            return
        ids, params = request.output_token_ids, request.params
        ended = request.finish_reason == "stop" and ids[-1] in request.stop_token_ids
        if ended and not params.include_stop_str_in_output:
            ids = ids[:-1]
        skip, text = params.skip_special_tokens, ""
        if params.detokenize:
            text = decode_all(self._tokenizer, ids, request.prompt_token_ids, skip_special_tokens=skip)
        request.text = text

    def _add_logprobs(
        self,
        requests: Sequence[Request],
        logprobs: Sequence[NDArray[Any]],
        first: NDArray[np.int64],
        tokens_SJ: NDArray[np.int64],
        taken: NDArray[np.int64],
    ) -> None:
        lists = _LogprobLists(*(each.tolist() for each in logprobs))
        for i, request in enumerate(requests):
            if (wanted := request.params.logprobs) is None:
                continue
            known = request.output_token_ids[: len(request.chosen_logprobs)]
            for spot in range(int(taken[i])):
                at = int(first[i]) + spot
                before = [*request.prompt_token_ids[-_CONTEXT:], *known[-_CONTEXT:], *tokens_SJ[i, :spot].tolist()]
                entry = self._entry(lists, at, int(tokens_SJ[i, spot]), wanted, before, request.params.detokenize)
                request.logprobs.append(entry)
                request.chosen_logprobs.append(lists.sampled[at])

    def add_prompt_logprobs(self, scored: Scored) -> None:
        """Wait for the prompt log probabilities of a step, and append them to their requests."""
        lists, at = _LogprobLists(*(each.tolist() for each in scored.wait())), 0
        tokens = scored.token_ids.tolist()
        for request, count in scored.requests:
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            for spot in range(at, at + count) if request.finish_reason is None else ():
                known = len(request.prompt_logprobs)
                before = request.prompt_token_ids[max(0, known - _CONTEXT) : known]
                entry = self._entry(lists, spot, tokens[spot], wanted, before, request.params.detokenize)
                request.prompt_logprobs.append(entry)
            at += count

    def _entry(
        self, lists: _LogprobLists, at: int, token: int, num_top: int, before: Sequence[int], detokenize: bool
    ) -> dict[int, Logprob]:
        """Return the log probabilities of one position: its token and the most likely ones.

        at: index of the position in `lists`. before: tokens before the position, to decode partial characters.
        """

        def logprob(token: int, value: float, rank: int) -> Logprob:
            if not detokenize:
                return Logprob(value, rank, None)
            text = self._token_text
            return Logprob(value, rank, text.added_text(before, token), text.bytes_of(token))

        entry = {token: logprob(token, lists.sampled[at], lists.rank[at])}
        for rank in range(num_top):
            other = lists.top_ids[at][rank]
            entry.setdefault(other, logprob(other, lists.top_values[at][rank], rank + 1))
        return entry


def _append(request: Request, tokens: list[int]) -> bool:
    """Append tokens if none of them can end the request, and it needs no text or grammar; returns whether it did."""
    output, drafted = request.output_token_ids, request.drafted
    if not tokens or request.detokenizer is not None or request.matcher is not None:
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
    """Advance the grammar of a request; returns whether it ends here without an end-of-sequence token."""
    if request.matcher is None:
        return False
    request.matcher.accept(token)
    return request.matcher.ended(without_end=len(request.output_token_ids) < request.params.min_tokens)
