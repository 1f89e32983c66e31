"""Closed forms of how often drafts are accepted.

Legend for shapes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.eagle.rules import Rule


def accepted_law(p: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """Probability that token v is drafted and accepted, (..., V), given that the drafts before it were.

    p, q: (..., V) laws of the target and of the draft. RATIO: min(p, q). COUPLED, both drawn with the same Gumbel
    noise: 1 / sum_w max(p_w / p_v, q_w / q_v), the Jaccard coupling of Moulton and Jiang (2018), in O(V log V). BLOCK
    does not test tokens one by one: for it this is RATIO's law, exact for one draft and a lower bound in sum.

    `ValueError` if the shapes differ.
    """
    if p.shape != q.shape:
        raise ValueError(f"p {tuple(p.shape)} and q {tuple(q.shape)} must have the same shape")
    if rule is not Rule.COUPLED:
        return torch.minimum(p, q)
    # In the order of p/q the larger of the two ratios is p's for all lanes behind v, and q's for those before it.
    order = (p.log() - q.log()).nan_to_num(nan=torch.inf).argsort(-1)
    p_sorted, q_sorted = p.gather(-1, order), q.gather(-1, order)
    p_behind = p_sorted.flip(-1).cumsum(-1).flip(-1)  # lane v itself included, which gives the term 1
    q_before = q_sorted.cumsum(-1) - q_sorted
    metadata = 1 / (p_behind / p_sorted + q_before / q_sorted)
    metadata = metadata.where((p_sorted > 0) & (q_sorted > 0), 0.0)
    return torch.empty_like(metadata).scatter_(-1, order, metadata)


def expected_accepted(p: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """Probability that a draft is accepted, (...), given that those before it were; 1 - TV(p, q) is the best possible.

    p, q: (..., V) laws of the target and of the draft, summing to 1. For a one-hot q every rule gives p at its token.
    See `accepted_law`.
    """
    return accepted_law(p, q, rule).sum(-1)
