"""The forms in C of a decode step as somebody else's C calls them: their addresses, and for which layers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bateleur.mamba.ops import native
from bateleur.mamba.ops.native import conv, ring
from bateleur.metadata.native import entry

_FUNCTIONS = {"placed": native, "conv": conv, "update": native, "gated_norm": native}
_OF_RINGS = ("replayable", "replay")


@cache
def addresses() -> dict[str, int]:
    """By name, of `conv`, `update` and `gated_norm`, and of `placed`, which refuses rows as `update` does."""
    return {name: entry(module.function(name)) for name, module in _FUNCTIONS.items()}


@cache
def ring_addresses() -> dict[str, int]:
    """By name, of `replay`, and of `replayable`, which refuses rows as it does."""
    return {name: entry(ring.function(name)) for name in _OF_RINGS}


def takes_rings(states: Tensor, entries: tuple[Tensor, ...]) -> bool:
    """Whether `replay` computes rows over rings (x, steps, B) of a float32 layer that `takes_layer` takes."""
    return all(each.dtype == torch.float32 and each.is_cpu for each in entries) and ring.takes_ring(
        states, *entries
    )


def takes_layer(
    max_query_len: int,
    windows: Tensor,
    states: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    by_head: tuple[Tensor, ...],
    norm: Tensor,
    groups: int,
) -> bool:
    """Whether rows of so many tokens of a float32 layer are computed by them: convolution, update and gated norm.

    windows, states: as of the operators; where there are rings, the live windows. by_head: A, D and dt_bias, (H,)
    each. norm: its weight, (inner,) or (inner / groups,).
    """
    (_, heads, channels, size), lanes = states.shape, conv_weight.shape[0]
    inner, of_groups = heads * channels, groups * size
    x = torch.empty(1, lanes)
    if lanes != inner + 2 * of_groups or inner % groups or norm.numel() not in (inner, inner // groups):
        return False
    parts = x.split_with_sizes([inner, of_groups, of_groups], -1)
    seen = parts[0].view(1, heads, channels), *(part.view(1, groups, size) for part in parts[1:])
    whole = all(each.is_contiguous() for each in (conv_weight, norm, *by_head))
    return (
        whole
        and inner // groups <= native.MOST_STATE
        and native.takes(max_query_len, (x, conv_weight, conv_bias, windows, norm), (states, *by_head))
        and native.takes_state(states, *seen, *by_head)
        and conv.fits(x, conv_weight, windows, conv_weight.shape[1] - 2 + max_query_len)
    )
