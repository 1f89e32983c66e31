"""Log probabilities of tokens under the raw logits of a model."""

# Shape letters: R rows of logits, V vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bateleur.eagle.log_normalizer import LogNormalizer

if TYPE_CHECKING:
    from bateleur.eagle import VocabShard


class Logprobs(NamedTuple):
    """Log probabilities of R tokens under the raw logits.

    top_ids: (R, n) int64, most likely first; `logprob_token_ids` of a request replace its first ones. n is the largest
        number that a request of the step needs.
    top_values: (R, n) float32.
    sampled: (R,) float32, of the sampled token.
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

    logits: (R, V) float32, of all V tokens of the vocabulary or of a shard.
    named: (R, k) int64 tokens that replace the first of the most likely ones, -1 for none; k <= num_top.
    Which of equally likely tokens are returned is undefined.
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
