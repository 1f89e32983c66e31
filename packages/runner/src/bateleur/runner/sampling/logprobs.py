"""Log probabilities of sampled tokens and of prompts, under the raw logits of a model."""

# Shape letters: R rows of logits, V vocabulary, T tokens of a step, N tokens of prompts that are scored, M hidden size.

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import VocabShard
from bateleur.eagle.vocab_shard import LogNormalizer
from bateleur.metadata import Fetch
from bateleur.runner.models import HybridDecoder
from bateleur.runner.requests.request import Request, RequestTable
from bateleur.runner.scheduling.step_batch import StepBatch
from bateleur.runner.utils.arrays import Int64s
from bateleur.runner.utils.device import upload

_LOGITS_AT_ONCE = 1 << 24
"""Logits of a slice: 64 MiB of float32, which is 67 tokens of a vocabulary of 250,000."""


class Logprobs(NamedTuple):
    """Log probabilities of R tokens under the raw logits.
    top_ids: (R, n) int64, most likely first; `logprob_token_ids` of a request replace its first ones. n is the largest
    number that a request of the step needs. top_values: (R, n) float32. sampled: (R,) float32, of the sampled token.
    rank: (R,) int64, rank of the sampled token; 1 is the most likely.
    """

    top_ids: Tensor
    top_values: Tensor
    sampled: Tensor
    rank: Tensor


def logprobs_of(
    logits: Tensor, token_ids: Tensor, num_top: int, shard: VocabShard | None = None, named: Tensor | None = None
) -> Logprobs:
    """Return log probabilities of `token_ids` (R,) and of the `num_top` most likely tokens of each row.
    logits: (R, V) float32, of all V tokens of the vocabulary or of a shard. named: (R, k) int64 tokens that replace the
    first of the most likely ones, -1 for none; k <= num_top. Which of equally likely tokens are returned is undefined.
    """
    scale = LogNormalizer.of(logits, shard)
    sampled_R1 = _gathered(logits, token_ids.unsqueeze(1), shard)
    above_R = (logits > sampled_R1).sum(dim=-1)
    values_Rn, ids_Rn = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    if shard is not None:
        shard.collectives.sum_(above_R)
        values_Rn, ids_Rn = shard.top(values_Rn, ids_Rn, num_top)
    if named is not None:
        (_, k), own_Rk = named.shape, _gathered(logits, named.clamp_min(0), shard)
        values_Rn[:, :k] = own_Rk.where(named >= 0, values_Rn[:, :k])
        ids_Rn[:, :k] = named.where(named >= 0, ids_Rn[:, :k])
    return Logprobs(ids_Rn, scale.log_probs(values_Rn), scale.log_probs(sampled_R1).squeeze(1), above_R.add_(1))


def _gathered(logits: Tensor, token_ids: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the logits of (R, k) tokens, also of those in other shards."""
    if shard is None:
        return logits.gather(1, token_ids)
    lane_Rk, here_Rk = shard.local_indices(token_ids)
    return shard.best(logits.gather(1, lane_Rk).where(here_Rk, -torch.inf))


class PendingPromptLogprobs(NamedTuple):
    """Prompt log probabilities of a step, while they are copied to the host.
    requests: each request, and for how many of its prompt tokens this step computed log probabilities. token_ids: (N,)
    these tokens of all requests, concatenated.
    """

    requests: list[tuple[Request, int]]
    token_ids: Int64s
    fetch: Fetch

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy, and return the fields of `Logprobs` with one row for each of `token_ids`."""
        fields, width = self.fetch.wait(), len(Logprobs._fields)
        return [np.concatenate(fields[i::width]) for i in range(width)]


def score_prompts(
    model: HybridDecoder, table: RequestTable, batch: StepBatch, hidden_TM: Tensor
) -> PendingPromptLogprobs | None:
    """Compute log probabilities of the prompt tokens that follow the prompt tokens of a step, from the hidden states of
    the step. None if no request needs any.
    """
    requests: list[tuple[Request, int]] = []
    rows: list[Int64s] = []
    tokens: list[Int64s] = []
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    for i in range(batch.num_decodes, len(batch.rows)):
        request, computed = batch.requests[i], int(batch.num_computed[i])
        if not request.lacks_prompt_logprobs:
            continue
        first = request.output.num_scored  # of a request that is recomputed, the first one that is missing
        end = min(computed + int(batch.query_lens[i]) + 1, len(request.prompt_token_ids))
        assert computed < first, "what a cache had was not computed"
        if first < end:
            requests.append((request, end - first))
            request.output.num_scored = end
            rows.append(np.arange(first, end) - 1 - computed + starts[i])
            tokens.append(table.token_ids[batch.rows[i], first:end].astype(np.int64))
    if not requests:
        return None
    wanted = max(request.params.prompt_logprobs or 0 for request, _ in requests)
    token_ids, size = np.concatenate(tokens), max(1, _LOGITS_AT_ONCE // model.spec.vocab_size)
    rows_N, ids_N = (upload(each, model.device).split(size) for each in (np.concatenate(rows), token_ids))
    fields: list[Tensor] = []
    for rows_n, ids_n in zip(rows_N, ids_N, strict=True):
        fields += logprobs_of(model.logits(hidden_TM.index_select(0, rows_n)), ids_n, wanted, model.shard)
    return PendingPromptLogprobs(requests, token_ids, Fetch(fields))
