"""Log probabilities of tokens under the logits of a model, before anything is done to these."""

# Shape letters: R rows of logits, V vocabulary.

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Logprobs(NamedTuple):
    """Log probabilities under the raw logits, before any processing.

    top_ids: (R, n) int64, most likely first; n is the most that a request of this step asked for.
    top_values: (R, n) float32.
    sampled: (R,) float32, of the drawn token.
    rank: (R,) int64, of the drawn token; 1 is the most likely.
    """

    top_ids: Tensor
    top_values: Tensor
    sampled: Tensor
    rank: Tensor


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Those of (R,) tokens, and of the `num_top` most likely ones, under (R, V) float32 logits."""
    logprobs_RV = logits.log_softmax(dim=-1)
    values_Rn, ids_Rn = logprobs_RV.topk(num_top, dim=-1)
    sampled_R1 = logprobs_RV.gather(1, token_ids.unsqueeze(1))
    rank_R = (logprobs_RV > sampled_R1).sum(dim=-1) + 1
    return Logprobs(ids_Rn, values_Rn, sampled_R1.squeeze(1), rank_R)
