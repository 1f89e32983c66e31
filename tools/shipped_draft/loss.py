"""What the head is trained for: that its drafts are accepted."""

# Shape letters: N rows, D hidden, V draft vocabulary.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256
"""Rows of logits that exist at once: a block stays in the processor's cache."""


class AcceptanceLoss(torch.autograd.Function):
    """A mix of KL divergence and total variation between the target's law and the draft's, with its gradient.

    The weight of KL is exp(-3 acceptance), as in LK losses (arXiv 2602.23881): far from the target total variation has
    hardly a gradient, close to it KL spends the head's few parameters on tails that no draft needs. The gradient with
    respect to the logits is formed together with the loss, block by block, so that (N, V) tensors never reach memory:
    that is half of a training step on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, law: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(loss, acceptance), means over rows.

        hidden: (N, D) states after the norm. weight: (V, D). law: (N, V) float32 law of the target at `temperature`; a
        row sums to less than 1 by what the draft vocabulary lacks.
        """
        narrow = torch.bfloat16 if hidden.is_cpu else torch.float32
        hidden_16, weight_16 = hidden.to(narrow), weight.to(narrow)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = acceptance = torch.zeros((), device=hidden.device)
        scale = 1 / (temperature * len(hidden))
        for begin in range(0, len(hidden), ROWS):
            h, p = hidden_16[begin : begin + ROWS], law[begin : begin + ROWS]
            z = F.linear(h, weight_16).float().div_(temperature)
            log_sum, mass = z.logsumexp(-1, keepdim=True), p.sum(-1, keepdim=True)
            kl = (log_sum * mass).sum() - torch.dot(p.flatten(), z.flatten())
            q = z.sub_(log_sum).exp_()
            below = (q < p).float()
            accepted = torch.minimum(p, q).sum()
            share = torch.exp(-3 * accepted / len(h))
            gain = (below * q).sum(-1, keepdim=True)
            grad = (mass * share + gain * (1 - share) - below.mul_(1 - share)).mul_(q).sub_(p * share)
            grad = grad.mul_(scale).to(narrow)
            grad_hidden[begin : begin + ROWS] = grad @ weight_16
            grad_weight += grad.T @ h
            loss = loss + share * kl + (1 - share) * (len(h) - accepted)
            acceptance = acceptance + accepted
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(acceptance)
        return loss / len(hidden), acceptance / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has formed."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None


def acceptance_loss(hidden: Tensor, weight: Tensor, law: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(loss, acceptance) of `AcceptanceLoss`, scalars; only the loss has a gradient."""
    loss, acceptance = AcceptanceLoss.apply(hidden.flatten(0, -2), weight, law.flatten(0, -2), temperature)
    return loss, acceptance


def logit_metric(output_matrix: Tensor, frequency: Tensor) -> Tensor:
    """(D, D) matrix G: d @ G @ d is the variance, over tokens by frequency, of the logits of a difference d of states.

    output_matrix: (V, D). frequency: (V,) counts or probabilities.
    """
    share = (frequency / frequency.sum()).to(output_matrix)[:, None]
    centred = output_matrix - (share * output_matrix).sum(0)
    return centred.T @ (share * centred)


def feature_loss(hidden: Tensor, wanted: Tensor, metric: Tensor) -> Tensor:
    """How far states are from the target's in their logits: (..., D) both, after their norms. Costs no vocabulary."""
    difference = hidden.float() - wanted
    return ((difference @ metric) * difference).sum(-1).mean()
