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

    top_ids: (R, n) int64, most likely first; n is the largest number that a request of the step needs.
    top_values: (R, n) float32.
    sampled: (R,) float32, of the sampled token.
    rank: (R,) int64, rank of the sampled token; 1 is the most likely.
    """

    top_ids: Tensor
    top_values: Tensor
    sampled: Tensor
    rank: Tensor


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int, shard: VocabShard | None = None) -> Logprobs:
    """Return log probabilities of tokens (R,) and of the `num_top` most likely ones, under float32 logits (R, V).

    shard: vocabulary shard of the logits; None for the whole vocabulary. If several tokens are equally likely at the
    end of the list, any of them may be returned.
    """
    scale = LogNormalizer.of(logits, shard)
    if shard is None:
        sampled_R1 = logits.gather(1, token_ids.unsqueeze(1))
    else:
        lane_R, here_R = shard.lanes(token_ids)
        sampled_R1 = shard.best(logits.gather(1, lane_R.unsqueeze(1)).where(here_R.unsqueeze(1), -torch.inf))
    above_R = (logits > sampled_R1).sum(dim=-1)
    values_Rn, ids_Rn = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    if shard is not None:
        shard.collectives.sum_(above_R)
        values_Rn, ids_Rn = shard.top(values_Rn, ids_Rn, num_top)
    return Logprobs(ids_Rn, scale.log_probs(values_Rn), scale.log_probs(sampled_R1).squeeze(1), above_R.add_(1))
