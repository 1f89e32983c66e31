"""Log probabilities of prompt tokens, one chunk of a prompt at a time.

Logits of all positions of a chunk could take more memory than anything else in a step, so they are computed in slices.
"""

# Shape letters: T tokens of a step, N tokens whose log probabilities are wanted, V vocabulary, M hidden size.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import Fetch
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request import Request
from bateleur.runner.requests.request_table import RequestTable
from bateleur.runner.sampling.logprobs import Logprobs, logprobs_of
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.utils.device import upload

_LOGITS_AT_ONCE = 1 << 24
"""Logits of a slice: 64 MiB of float32, which is 67 tokens of a vocabulary of 250,000."""


class PendingPromptLogprobs(NamedTuple):
    """Prompt log probabilities of a step, while they are copied to the host.

    requests: each request, and for how many of its prompt tokens this step computed log probabilities.
    token_ids: (N,) these tokens of all requests, concatenated.
    """

    requests: list[tuple[Request, int]]
    token_ids: NDArray[np.int64]
    fetch: Fetch

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy, and return the fields of `Logprobs` with one row for each of `token_ids`."""
        fields, width = self.fetch.wait(), len(Logprobs._fields)
        return [np.concatenate(fields[i::width]) for i in range(width)]


class PromptLogprobs:
    """Computes log probabilities of prompt tokens for the requests that ask for them."""

    def __init__(self, model: HybridDecoder, table: RequestTable) -> None:
        self._model, self._table = model, table
        self._tokens_at_once = max(1, _LOGITS_AT_ONCE // model.spec.vocab_size)

    def score(self, batch: StepBatch, hidden_TM: Tensor) -> PendingPromptLogprobs | None:
        """Compute log probabilities of the prompt tokens after the tokens of this step; None if no request needs any.

        A request that is recomputed gets only the ones that it has not got before.
        """
        asked = [i for i in range(batch.num_decodes, len(batch.rows)) if batch.requests[i].lacks_prompt_logprobs]
        if not asked:
            return None
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        requests: list[tuple[Request, int]] = []
        rows: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        for i in asked:
            request, row = batch.requests[i], batch.rows[i]
            computed = int(batch.num_computed[i])
            first = request.output.num_scored
            end = min(computed + int(batch.query_lens[i]) + 1, len(request.prompt_token_ids))
            assert computed < first, "what a cache had was not computed"
            if first < end:
                requests.append((request, end - first))
                request.output.num_scored = end
                rows.append(np.arange(first, end) - 1 - computed + starts[i])
                tokens.append(self._table.token_ids[row, first:end].astype(np.int64))
        if not requests:
            return None
        wanted = max(request.params.prompt_logprobs or 0 for request, _ in requests)
        token_ids = np.concatenate(tokens)
        slices = self._slices(hidden_TM, np.concatenate(rows), token_ids, wanted)
        return PendingPromptLogprobs(requests, token_ids, Fetch([each for logprobs in slices for each in logprobs]))

    def _slices(
        self, hidden_TM: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64], num_top: int
    ) -> list[Logprobs]:
        rows_N, ids_N = (upload(each, self._model.device) for each in (rows, token_ids))
        size = self._tokens_at_once
        slices = zip(rows_N.split(size), ids_N.split(size), strict=True)
        return [
            logprobs_of(self._model.logits(hidden_TM.index_select(0, rows)), ids, num_top, self._model.shard)
            for rows, ids in slices
        ]
