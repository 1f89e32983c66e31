"""The specification: entry by entry."""

from __future__ import annotations

from torch import Tensor

from bateleur.mamba.ops.shared.reference import compute, load, replay


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
    """Run the recurrence from `src` over the first `count` entries of the ring, and cut the window out of `live`."""
    keep = conv_state.shape[2]
    layers = zip(ssm_state, conv_state, live, ring_x, ring_dt, ring_B, A, strict=True)
    for ssm, conv, windows, x, step, B, a in layers:
        for row, state in enumerate(load(ssm, src, compute(ring_dt))):
            if page := int(dst[row]):
                ring, first = int(ring_row[row]), int(page_offset[row])
                rings = (x[ring], step[ring], B[ring])
                folded = replay(state, rings, int(ring_start[row]), int(count[row]), a)
                ssm[page] = folded.to(ssm.dtype)
                conv[page] = windows[ring, first : first + keep].to(conv.dtype)
