"""Norms over lanes that are spread over several ranks, which exchange sums of squares.

Shapes: T tokens of all requests, I lanes of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.runner.distributed.ranks import Ranks


def gated_norm_over_ranks(
    x_TI: Tensor,
    gate_TI: Tensor,
    weight: Tensor,
    of_groups: tuple[int, int],
    eps: float,
    norm_first: bool,
    ranks: Ranks,
) -> Tensor:
    """`gated_rms_norm` with SiLU if one group of lanes is spread over several ranks, with I lanes on each.

    of_groups: index of the group, and number of groups. weight (I,).
    """
    gate, x = F.silu(gate_TI.float()), x_TI.float()
    y = x if norm_first else gate.mul_(x)
    group, groups = of_groups
    squares_TG = y.new_zeros(len(y), groups)
    squares_TG[:, group] = y.square().sum(-1)
    lanes = y.shape[1] * ranks.size // groups
    y = y * (ranks.sum_(squares_TG)[:, group : group + 1] / lanes + eps).rsqrt_()
    if norm_first:
        return gate.mul_(y.mul_(weight)).to(x_TI.dtype)
    return y.to(x_TI.dtype).mul_(weight)


def qk_norm_over_ranks(
    parts: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], lanes: tuple[int, int], eps: float, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Root mean square norms over all queries and over all keys of a token, of which this rank has some lanes.

    parts: (T, lanes of this rank) each; ranks may have keys in common. weights: of these lanes. lanes: of the layer.
    """
    wide = [part.float() for part in parts]
    copies = [ranks.size * part.shape[1] // count for part, count in zip(parts, lanes, strict=True)]
    squares = torch.stack([part.square().sum(-1) / each for part, each in zip(wide, copies, strict=True)], 1)
    squares = ranks.sum_(squares)
    q, k = (
        (part * (squares[:, i : i + 1] / lanes[i] + eps).rsqrt_()).to(parts[i].dtype).mul_(weights[i])
        for i, part in enumerate(wide)
    )
    return q, k
