"""Log probabilities of emitted tokens and of prompts, as their requests return them."""

# Shape letters: S rows that sample, J tokens of a row at most.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.outputs import Logprob
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling.prompt_logprobs import PendingPromptLogprobs
from bateleur.runner.text.token_bytes import TokenText

_CONTEXT = 3
"""Tokens before one that may hold the first bytes of its character."""


class _LogprobLists(NamedTuple):
    """`Logprobs` as lists."""

    top_ids: list[list[int]]
    top_values: list[list[float]]
    sampled: list[float]
    rank: list[int]


class LogprobsProcessor:
    """Appends log probabilities to requests."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def append(
        self,
        requests: Sequence[Request],
        logprobs: Sequence[NDArray[Any]],
        first_S: NDArray[np.int64],
        tokens_SJ: NDArray[np.int64],
        num_tokens_S: NDArray[np.int64],
    ) -> None:
        """Append log probabilities to S requests: of the first `num_tokens_S[i]` tokens in row i of `tokens_SJ`.

        logprobs: fields of `Logprobs`. first_S: (S,) index of each request's first token in these fields.
        """
        lists = _LogprobLists(*(each.tolist() for each in logprobs))
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
        lists, row = _LogprobLists(*(each.tolist() for each in scored.wait())), 0
        tokens = scored.token_ids.tolist()
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
        self, lists: _LogprobLists, row: int, token: int, num_top: int, before: Sequence[int], detokenize: bool
    ) -> dict[int, Logprob]:
        """Return log probabilities at index `row` of `lists`: of `token`, and of the `num_top` most likely tokens.

        before: tokens before `token`, on which its text depends.
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
