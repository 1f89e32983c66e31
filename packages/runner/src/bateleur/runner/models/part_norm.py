"""RMS norms over vectors whose elements are divided among several ranks. The ranks exchange sums of squares."""

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
    """Return the gated RMS norm with SiLU over elements that are divided among ranks; each rank has I of them.

    x_TI, gate_TI: this rank's elements. weight (I,). of_groups: index of this rank's norm group, and number of groups.
    norm_first: whether the norm comes before the gate.
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
    """Return RMS norms over all queries and over all keys of a token. This rank has some of their elements.

    parts: queries and keys, (T, elements of this rank) each; several ranks may have the same keys. weights: weights of
    this rank's elements. lanes: numbers of query and key elements per token in the whole layer.
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
