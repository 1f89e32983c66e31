"""Routing of tokens to experts, sorting by expert, and the weighted sum; one launch each on CUDA.

Shapes: T tokens, E experts, K experts of a token, S pairs of token and expert (T * K), L elements of an expert output.

Granite takes the softmax of the chosen logits. Qwen takes the softmax of all logits and divides the chosen weights by
their sum. The weights are the same, so one code path serves both. A sigmoid router (Nemotron-H, Kimi, LFM2) may add a
correction to the scores and limit the choice to some groups of experts. Neither changes the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bateleur.runner.models.operators import operator
from bateleur.runner.models.spec import RouterSpec


def route(logits_TE: Tensor, spec: RouterSpec, top_k: int, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights (T, K) float32 and ids (T, K) int64 of each token's `top_k` best experts.

    correction_E: added to the scores for the choice, but not for the weights.
    """
    sum_eps = spec.sum_eps if spec.normalised else None
    groups = [spec.num_groups, spec.top_groups]
    sigmoid = spec.scores == "sigmoid"
    return route_tokens(logits_TE, correction_E, top_k, sigmoid, sum_eps, spec.scale, groups)


def logistic(x: Tensor) -> Tensor:
    """Return the sigmoid of each number, with bits that do not depend on its position.

    On a CPU, torch's sigmoid has other bits in a tensor's last elements, so the choice between equally good experts
    would depend on the number of tokens.
    """
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype) if x.is_cpu else x.sigmoid()


def _fake_route(logits: Tensor, correction: Tensor | None, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@operator("router", _fake_route)
def route_tokens(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    sigmoid: bool,
    sum_eps: float | None,
    scale: float,
    groups: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return weights and ids of each token's experts, see `route`.

    logits: (T, E). correction: (E,) or None. sigmoid: True for scores that are sigmoids of the logits, False for their
    softmax. sum_eps: None if weights are not divided by their sum; else a number added to the sum of sigmoids.
    scale: factor on weights. groups: [number of groups of experts, number of groups that a token may choose from].

    The Triton kernel ranks a NaN score highest, and of equal scores the one with the lower expert id.
    """
    if sigmoid:
        scores_TE = logistic(logits)
        experts_TK = _best(scores_TE, correction, top_k, groups)
        weights_TK = scores_TE.gather(1, experts_TK)
        if sum_eps is not None:
            weights_TK /= weights_TK.sum(-1, keepdim=True).add_(sum_eps)
    else:
        weights_TK, experts_TK = logits.topk(top_k)
        if sum_eps is not None:
            weights_TK = weights_TK.softmax(-1)
        else:
            weights_TK = (weights_TK - logits.logsumexp(-1, keepdim=True)).exp_()
    return (weights_TK if scale == 1.0 else weights_TK.mul_(scale)), experts_TK


def _best(scores_TE: Tensor, correction_E: Tensor | None, top_k: int, groups: Sequence[int]) -> Tensor:
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    every, kept_groups = groups
    if kept_groups < every:
        choice_TGE = choice_TE.unflatten(-1, (every, -1))
        group_TG = choice_TGE.topk(2).values.sum(-1)
        kept = group_TG.topk(kept_groups).indices
        left_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept, False)
        choice_TE = choice_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return choice_TE.topk(top_k).indices


def _fake_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    size = experts.numel()
    return experts.new_empty(size), experts.new_empty(size), experts.new_empty(num_experts, dtype=torch.int32)


@operator("router", _fake_sort)
def sort_places(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, expert) pairs by expert on the device. The host need not know how many tokens an expert gets.

    experts (T, K) int64, in range(num_experts). Returns the token of every sorted pair, (S,) int64; the sorted position
    of every pair t * K + k, (S,) int64; the end of each expert's pairs, (E,) int32.
    """
    sorted_S, order_S = experts.flatten().sort(stable=True)
    positions_S = torch.arange(len(order_S), device=order_S.device)
    sorted_index_S = torch.empty_like(order_S).index_copy_(0, order_S, positions_S)
    every_E = torch.arange(num_experts, device=experts.device)
    expert_ends_E = torch.searchsorted(sorted_S, every_E, right=True, out_int32=True)
    return order_S // experts.shape[1], sorted_index_S, expert_ends_E


@operator("router", lambda y, index, weights, *_: y.new_empty(weights.shape[0], y.shape[1]))
def combine(y: Tensor, sorted_index: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return `sum_k weights[t, k] * y[sorted_index[t * K + k]] (+ shared[t] (* sigmoid(gate[t])))` (T, L) in y's dtype.

    y (S, L): outputs of the sorted pairs of token and expert; sorted_index (S,) int64: sorted position of pair t * K +
    k; weights (T, K) float32; shared (T, L) and gate (T, 1) of y's dtype. The best expert is added first, so a token's
    sum does not depend on other tokens. The Triton kernel rounds once.
    """
    y_TKL = y.index_select(0, sorted_index).view(*weights.shape, y.shape[1])
    return add_shared((y_TKL * weights.unsqueeze(-1)).sum(1).to(y.dtype), shared, gate)


def add_shared(y: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Add the shared expert's output to y in place, times the sigmoid of its gate if it has one."""
    return y if shared is None else y.add_(shared if gate is None else shared * logistic(gate))
