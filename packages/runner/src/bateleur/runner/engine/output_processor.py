"""From drawn token ids to what the caller sees: stop conditions, log probabilities, text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.outputs import Logprob
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.prompt_logprobs import Scored
from bateleur.runner.sampling.verified import Verified
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.text.detokenizer import decode_all
from bateleur.runner.text.token_bytes import TokenText
from bateleur.runner.text.tokenizer import Tokenizer
from bateleur.runner.utils.device import Fetch

NO_NUMBERS = "the model's logits are not numbers (NaN)"
_NO_TOKEN = "no token is left that the request's own parameters allow"
_CONTEXT = 3
"""Tokens before one that may have begun its character."""
_BAD = (None, NO_NUMBERS, _NO_TOKEN)


class Emitted(NamedTuple):
    """What a step emitted for its S rows that drew, on the host."""

    token_ids: NDArray[np.int64]
    """(S, J), -1 behind the last."""
    num_emitted: NDArray[np.int64]
    """(S,) tokens that verification let through."""
    num_taken: NDArray[np.int64]
    """(S,) of these, what the request kept: no more than up to its end."""
    num_drafts: NDArray[np.int64]
    """(S,) drafts before the first that the drafter left out, some perhaps more than the row was to test."""
    num_accepted: NDArray[np.int64]
    """(S,) drafts that verification let through."""
    reports: list[Request]
    """Requests that ended, and those that stream."""


class _Told(NamedTuple):
    """`Logprobs` as lists."""

    top_ids: list[list[int]]
    top_values: list[list[float]]
    sampled: list[float]
    rank: list[int]


class OutputProcessor:
    """Says which drawn tokens requests take, and ends those that are done.

    Most rows just take what was verified, which arithmetic over all rows finds out: nobody looks at their requests,
    and it is enough that their tokens are written to the table. The others are looked at one by one: where something
    may end the request, or goes on with each of its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, table: RequestTable, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._token_text = TokenText(tokenizer)
        self._stops: tuple[frozenset[int], NDArray[np.bool_]] = (
            frozenset(),
            np.zeros(vocab_size + 1, np.bool_),
        )
        """Tokens that may end a request that runs, and by token whether it does; the last is for -1, which is none."""

    def admit(self, admitted: Sequence[Request], running: Sequence[Request]) -> None:
        """Some of those that run got their rows just now."""
        known, ends = self._stops
        if all(request.stop_token_ids <= known for request in admitted):
            return
        known, ends = frozenset().union(*(request.stop_token_ids for request in running)), np.zeros_like(ends)
        ends[list(known)] = True
        self._stops = known, ends

    @staticmethod
    def fetch(verified: Verified) -> Fetch:
        """Send to the host what `emit` needs; call it as soon as a step is verified."""
        if verified.packed is not None:
            return Fetch([verified.packed])
        bad = verified.bad.long() if verified.empty is None else verified.bad.long() + verified.empty
        counts = (verified.num_emitted.unsqueeze(1), bad.unsqueeze(1))
        tokens = torch.cat((*counts, verified.token_ids, verified.drafts), 1)
        return Fetch([tokens, *(verified.logprobs or ())])

    def emit(
        self,
        requests: Sequence[Request],
        rows: NDArray[np.int64],
        verified: Verified,
        fetched: Fetch,
        present: NDArray[np.bool_] | None,
    ) -> Emitted:
        """Wait for the tokens of S requests (the step's only wait for the device), and say which of them they take.

        rows: (S,) of the table. present: (S,) whether the row is still the request's, None for all; a request that has
            ended has none.

        Tokens behind a stop are not taken, and none of a request that has ended. A row whose logits held a NaN, or
        where every token was forbidden, has no token there: its request ends with `finish_reason` "error".
        """
        on_host, *logprobs = fetched.wait()
        num_emitted, bad, width = on_host[:, 0], on_host[:, 1], verified.token_ids.shape[1]
        tokens_SJ = on_host[:, 2 : 2 + width]
        taken, num_drafts, num_accepted, looked = self._read(rows, on_host, width, present)
        reports: list[Request] = []
        for i in looked:
            request = requests[i]
            if request.finish_reason is not None:  # while the step was in flight
                taken[i] = 0
                continue
            tokens = tokens_SJ[i, : num_emitted[i]].tolist()
            if bad[i] or not _goes_on(request, tokens):
                taken[i] = self._apply_bounded(request, tokens, int(bad[i]))
            if request.finish_reason is not None or request.stream:
                reports.append(request)
        if logprobs:
            self._add_logprobs(requests, logprobs, verified.first_logits, tokens_SJ, taken)
        return Emitted(tokens_SJ, num_emitted, taken, num_drafts, num_accepted, reports)

    def _read(
        self,
        rows: NDArray[np.int64],
        on_host: NDArray[np.int64],
        width: int,
        present: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[int]]:
        """Of S rows, with `width` tokens each: (S,) how many tokens were emitted, to be written to; (S,) drafts before
        the first that is none; (S,) how many of them were accepted; and which rows may take other tokens than were
        emitted, or do more with them.
        """
        num_emitted, bad, drafts_SK = on_host[:, 0], on_host[:, 1], on_host[:, 2 + width :]
        looked = self._to_look_at(rows, on_host[:, 2 : 2 + width], num_emitted, bad, present)
        num_drafts = _leading(drafts_SK >= 0) if drafts_SK.shape[1] else np.zeros_like(num_emitted)
        return num_emitted.copy(), num_drafts, np.maximum(num_emitted - 1, 0), looked.tolist()

    def _to_look_at(
        self,
        rows: NDArray[np.int64],
        tokens_SJ: NDArray[np.int64],
        num_emitted: NDArray[np.int64],
        bad: NDArray[np.int64],
        present: NDArray[np.bool_] | None,
    ) -> NDArray[np.int64]:
        """Which of S rows may take other tokens than those that were emitted, or do more with them."""
        table = self._table
        looked = table.num_known[rows] + num_emitted >= table.watched_from[rows]
        stops_SJ = self._stops[1][tokens_SJ]
        if np.count_nonzero(stops_SJ):
            looked |= stops_SJ.any(1)
        if np.count_nonzero(bad):
            looked |= bad > 0
        if present is not None:
            looked |= ~present
        return looked.nonzero()[0]

    def _apply_bounded(self, request: Request, tokens: Sequence[int], bad: int) -> int:
        """Append tokens that may end the request, and say what it ends with where the logits were bad; how many."""
        # What is emitted last is the target's own, but where that was bad; before it stand confirmed drafts.
        count = self._apply(request, tokens, len(tokens) - (not bad))
        if bad and request.finish_reason is None:
            request.finish_reason = "error"
            request.stop_reason = (request.matcher and request.matcher.error) or _BAD[bad]
        return count

    def _apply(self, request: Request, tokens: Sequence[int], num_drafts: int) -> int:
        """Append tokens, the first of them drafts, until one ends the request or is none; how many."""
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
        """Say what the last token ends its request with, if with anything."""
        stops, detokenizer = token in request.stop_token_ids, request.detokenizer
        # A stop token is not part of the text, unless it is asked for.
        if detokenizer is not None and (not stops or request.params.include_stop_str_in_output):
            detokenizer.push(token)
            if detokenizer.stopped is not None and not stops:
                request.finish_reason, request.stop_reason = "stop", detokenizer.stopped
                return
        if stops:
            request.finish_reason = "stop"
            request.stop_reason = self._stop_reason(request.params, token)
        elif _follows_to_its_end(request, token):
            request.finish_reason = "stop"
        elif len(request.prompt_token_ids) + len(request.output_token_ids) >= request.max_total_tokens:
            request.finish_reason = "length"

    def _stop_reason(self, params: SamplingParams, token: int) -> int | str | None:
        """What the request says of the token that ended it: its id, the stop string that it is, or nothing."""
        if token in params.stop_token_ids:
            return token
        return text if params.stop and (text := self._token_text.text_of(token)) in params.stop else None

    def close(self, request: Request) -> None:
        """Settle the final text of a request that has ended."""
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
        told = _Told(*(each.tolist() for each in logprobs))
        for i, request in enumerate(requests):
            if (wanted := request.params.logprobs) is None:
                continue
            known = request.output_token_ids[: len(request.chosen_logprobs)]
            for spot in range(int(taken[i])):
                at = int(first[i]) + spot
                before = [
                    *request.prompt_token_ids[-_CONTEXT:],
                    *known[-_CONTEXT:],
                    *tokens_SJ[i, :spot].tolist(),
                ]
                entry = self._entry(
                    told, at, int(tokens_SJ[i, spot]), wanted, before, request.params.detokenize
                )
                request.logprobs.append(entry)
                request.chosen_logprobs.append(told.sampled[at])

    def add_prompt_logprobs(self, scored: Scored) -> None:
        """Wait for what a step found out about prompts, and give it to their requests."""
        told, at = _Told(*(each.tolist() for each in scored.wait())), 0
        tokens = scored.token_ids.tolist()
        for request, count in scored.requests:
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            for spot in range(at, at + count) if request.finish_reason is None else ():
                known = len(request.prompt_logprobs)
                before = request.prompt_token_ids[max(0, known - _CONTEXT) : known]
                entry = self._entry(told, spot, tokens[spot], wanted, before, request.params.detokenize)
                request.prompt_logprobs.append(entry)
            at += count

    def _entry(
        self, told: _Told, at: int, token: int, num_top: int, before: Sequence[int], detokenize: bool
    ) -> dict[int, Logprob]:
        """Of one place: its token, and the most likely ones. before: the tokens before it."""

        def logprob(token: int, value: float, rank: int) -> Logprob:
            if not detokenize:
                return Logprob(value, rank, None)
            text = self._token_text
            return Logprob(value, rank, text.added_text(before, token), text.bytes_of(token))

        entry = {token: logprob(token, told.sampled[at], told.rank[at])}
        for rank in range(num_top):
            other = told.top_ids[at][rank]
            entry.setdefault(other, logprob(other, told.top_values[at][rank], rank + 1))
        return entry


def _leading(flags_SK: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(S,) how many of each row are true before the first that is not."""
    if np.count_nonzero(flags_SK) == flags_SK.size:
        return np.full(len(flags_SK), flags_SK.shape[1], np.int64)
    found: NDArray[np.int64] = flags_SK.cumprod(1).sum(1)
    return found


def _goes_on(request: Request, tokens: list[int]) -> bool:
    """Append tokens none of which can end the request, nor concern its text or grammar; False if some may."""
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


def _follows_to_its_end(request: Request, token: int) -> bool:
    """Go on in the grammar, if there is one; whether it ends here, where no end-of-sequence token can say so."""
    if request.matcher is None:
        return False
    request.matcher.accept(token)
    return request.matcher.ended(without_end=len(request.output_token_ids) < request.params.min_tokens)
