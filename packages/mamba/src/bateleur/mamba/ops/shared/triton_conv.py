"""Helpers of the convolution kernels: inputs by position, where the initial window has negative positions.

Legend: T tokens of a tile, E entries of a window, C channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.ops.shared.triton import load_tile, silu, store_tile


@triton.jit
def inputs(x_C, window_C, position_E, count, window_C_real, real_C, x_token, entry, KEEP: tl.constexpr):
    """Load raw inputs (E, C) at ``position_E`` of a request of ``count`` tokens, in float32; zeros after the end.

    ``x_C`` points to the request's first token, ``window_C`` to the oldest of the ``KEEP`` window entries, both by
    channel. Position -1 is the last window entry. If ``window_C_real`` is false, the window is zero and is not read.
    """
    new_E, old_E = (position_E >= 0) & (position_E < count), position_E < 0
    x_EC = load_tile(x_C, position_E.to(tl.int64) * x_token, new_E, real_C).to(tl.float32)
    old_EC = load_tile(window_C, (position_E + KEEP) * entry, old_E, window_C_real).to(tl.float32)
    return tl.where(old_E[:, None], old_EC, x_EC)


@triton.jit
def convolve(
    x_C, window_C, position_T, count, window_C_real, real_C, x_token, entry, weight_C, bias_C,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Return outputs (T, C) at ``position_T`` in float32. ``weight_C`` and ``bias_C`` are pointers by channel."""
    y_TC = tl.zeros([position_T.shape[0], real_C.shape[0]], tl.float32)
    if HAS_BIAS:
        y_TC += tl.load(bias_C, mask=real_C, other=0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at_T = position_T - (WIDTH - 1) + tap
        tap_TC = inputs(x_C, window_C, at_T, count, window_C_real, real_C, x_token, entry, WIDTH - 1)
        y_TC += tap_TC * tl.load(weight_C + tap, mask=real_C, other=0).to(tl.float32)[None, :]
    if SILU:
        y_TC = silu(y_TC)
    return y_TC


@triton.jit
def keep_window(
    window_ptr, conv_ptr, offset, tile, window_entry, conv_entry,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy ``KEEP`` entries of a request conv window, from ``offset`` on, to a state slot, for one tile of channels."""
    e, c = tl.arange(0, BLOCK_E), tile * BLOCK_C + tl.arange(0, BLOCK_C)
    window_EC = load_tile(window_ptr + c, (offset + e) * window_entry, e < KEEP, c < CHANNELS)
    store_tile(conv_ptr + c, e * conv_entry, window_EC, e < KEEP, c < CHANNELS)


def is_silu(activation: str) -> bool:
    """Return whether the activation is SiLU. Raises ValueError for an unknown activation."""
    if activation not in ("silu", "none"):
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or 'none'")
    return activation == "silu"


def bias_or(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `bias`, or `weight` as a placeholder that the kernel does not read."""
    return weight if bias is None else bias
