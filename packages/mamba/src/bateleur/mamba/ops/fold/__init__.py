"""Accepted inputs, folded into a state. Shapes: as in `shared.rings`."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.mamba.ops.library import operator
from bateleur.mamba.ops.shared import compute, in_place, load, run_of, store
from bateleur.mamba.ops.shared.rings import Ages, by_age, by_group, decays, take
from bateleur.mamba.ops.shared.windows import keep_windows


@operator(mutates=("ssm_state", "conv_state"), native="ring")
def fold_ring(
    ssm_state: Tensor,
    conv_state: Tensor,
    live: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ring_row: Tensor,
    ring_start: Tensor,
    count: Tensor,
    src: Tensor,
    dst: Tensor,
    page_offset: Tensor,
) -> None:
    """Advance states by the first `count` entries of their rings: the page after them goes to slot `dst`.

    In some layers at once, which all tensors but those of the rows have in front: ssm_state (layers, slots, H, P, N).
    In each, ssm_state[dst] is ssm_state[src] after the entries, where src and dst may be one slot; conv_state[dst],
    (slots, W - 1, C), is live[ring_row, page_offset : page_offset + W - 1]. Rings, live, A and ring rows as for
    `replay_update` and `causal_conv1d_varlen`; ring_row, ring_start, count, src, dst and page_offset (R,) int64. A row
    with dst 0 is not folded, whatever its other fields hold. The rings are not changed: the caller moves ring_start.
    """
    places = ring_row, ring_start, count, src, dst, page_offset
    if dst.device.type == "cpu":  # the rows with a destination; elsewhere all
        if not any(dst.tolist()):
            return
        ring_row, ring_start, count, src, dst, page_offset = torch.stack(places)[:, dst != 0]
    keep_windows(conv_state, live, ring_row, dst, page_offset)
    ages = by_age(ring_row, ring_start, count - 1, ring_x.shape[2])
    for layer in zip(ssm_state, ring_x, ring_dt, ring_B, A, strict=True):
        _fold_layer(*layer, ages, src, dst)


def _fold_layer(
    ssm_state: Tensor,
    ring_x: Tensor,
    ring_dt: Tensor,
    ring_B: Tensor,
    A: Tensor,
    ages: Ages,
    src: Tensor,
    dst: Tensor,
) -> None:
    """Decay the state over all entries, and add each one's outer product, decayed over those after it."""
    (_, _, heads, channels), dtype, groups = ring_x.shape, compute(ring_dt), ring_B.shape[2]
    decay, weight = decays(ring_dt, ages, A, 1, dtype)
    decay = decay.view(-1, heads, 1, 1)
    u = take(ring_x, ages.at).to(dtype).unflatten(2, (heads, channels)) * weight.view(
        *ages.at.shape, heads, 1
    )
    u = by_group(u.flatten(2), groups).mT
    Bs = by_group(take(ring_B, ages.at).to(dtype), groups)
    a, b = (run_of(src), run_of(dst)) if in_place(ssm_state, dtype) else (None, None)
    if a is not None and b is not None and (a == b or a.stop <= b.start or b.stop <= a.start):
        state = torch.mul(ssm_state[a], decay, out=ssm_state[b])
        state.view(len(u), -1, Bs.shape[2]).baddbmm_(u, Bs)
    else:
        state = load(ssm_state, src, dtype).mul_(decay)
        state.view(len(u), -1, Bs.shape[2]).baddbmm_(u, Bs)
        store(ssm_state, dst, state)
