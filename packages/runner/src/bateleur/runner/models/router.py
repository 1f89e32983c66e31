"""Which experts a token goes to. Shapes: T tokens, M hidden size, E experts, K of them for a token, G groups.

The four kinds that checkpoints have are two, each with or without a division by the sum:

softmax, normalised: of the logits of the chosen (Granite); of all logits, divided by the sum of the chosen (Qwen),
    which is the same.
softmax: of all logits, as it is (Qwen without `norm_topk_prob`).
sigmoid: of each logit; a correction and groups have a say in the choice, not in the weights (Nemotron-H, Kimi, LFM2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.runner.models.spec import RouterSpec


def route(
    logits_TE: Tensor, spec: RouterSpec, top_k: int, correction_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights (T, K) float32 and experts (T, K) int64 of logits (T, E) float32, the best first."""
    if spec.scores == "sigmoid":
        scores_TE = logits_TE.sigmoid()
        experts_TK = _best(scores_TE, spec, top_k, correction_E)
        weights_TK = scores_TE.gather(1, experts_TK)
        if spec.normalised:
            weights_TK /= weights_TK.sum(-1, keepdim=True).add_(spec.sum_eps)
    else:
        weights_TK, experts_TK = logits_TE.topk(top_k)
        if spec.normalised:
            weights_TK = weights_TK.softmax(-1)
        else:
            weights_TK = (weights_TK - logits_TE.logsumexp(-1, keepdim=True)).exp_()
    return (weights_TK if spec.scale == 1.0 else weights_TK.mul_(spec.scale)), experts_TK


def _best(scores_TE: Tensor, spec: RouterSpec, top_k: int, correction_E: Tensor | None) -> Tensor:
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if spec.top_groups < spec.num_groups:
        choice_TGE = choice_TE.unflatten(-1, (spec.num_groups, -1))
        group_TG = choice_TGE.topk(2).values.sum(-1)
        kept = group_TG.topk(spec.top_groups).indices
        left_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept, False)
        choice_TE = choice_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return choice_TE.topk(top_k).indices
