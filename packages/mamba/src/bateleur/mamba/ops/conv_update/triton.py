"""The causal convolution of decodes, whose window starts at any entry of its state slot.

Legend: T tokens of a row, E entries of the window after the row, C channels of a tile.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import LAUNCH, require_dense, store_tile, unless_null, zero_tail
from bateleur.mamba.ops.shared.triton_conv import bias_or, convolve, inputs, is_silu
from bateleur.metadata.dispatch import cdiv


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def conv_update_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, starts_ptr, read_ptr, offset_ptr, write_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, x_token, conv_slot, conv_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of each decode, and write the conv window after them.

    Grid (tiles of channels, requests + 1): the last programs zero the tokens of no request.
    Occupancy on sm_90: at least 7 blocks per SM.
    """
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    real_C = c < CHANNELS
    first, there = tl.load(starts_ptr + row), row < num_rows  # all loads in flight at once
    read = tl.load(read_ptr + row, mask=there, other=0).to(tl.int64)
    write = tl.load(write_ptr + row, mask=there, other=0).to(tl.int64)
    offset = tl.load(offset_ptr + row, mask=there, other=0)
    if row == num_rows:
        zero_tail(y_ptr, first, num_tokens, CHANNELS, c, real_C)
        return
    count = tl.minimum(tl.load(starts_ptr + row + 1) - first, max_query_len)
    if count <= 0:
        return
    token = first.to(tl.int64)
    x_C = x_ptr + token * x_token + c
    window_C = conv_ptr + read * conv_slot + offset * conv_entry + c
    read_C = c < unless_null(read, CHANNELS)
    y_TC = convolve(
        x_C, window_C, t, count, read_C, real_C, x_token, conv_entry,
        weight_ptr + c * WIDTH, bias_ptr + c, WIDTH, HAS_BIAS, SILU,
    )  # fmt: skip
    store_tile(y_ptr + c, (token + t) * CHANNELS, y_TC, t < count, real_C)
    # Window and tokens without the oldest entry: entry 0 is the input at position 2 - WIDTH.
    left_EC = inputs(x_C, window_C, e + 2 - WIDTH, count, read_C, real_C, x_token, conv_entry, WIDTH - 1)
    tl.debug_barrier()  # read and write may be one slot
    left_E = e < unless_null(write, WIDTH - 2 + count)
    store_tile(conv_ptr + write * conv_slot + c, e * conv_entry, left_EC, left_E, real_C)


@cache
def tile_options(width: int, max_query_len: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `conv_update_kernel`."""
    block_e = triton.next_power_of_2(max(1, width - 2 + max_query_len))
    return LAUNCH | {
        "BLOCK_T": triton.next_power_of_2(max_query_len),
        "BLOCK_E": block_e,
        "BLOCK_C": max(64, min(256, 2048 // block_e)),
    }


def causal_conv1d_update(
    x, weight, bias, conv_state, query_start_loc, max_query_len, read, offset, write, activation,
):  # fmt: skip
    """Convolve 1 to 1 + K tokens (K drafts) per request. No request may write a state slot that another reads."""
    require_dense(1, x=x, conv_state=conv_state)
    require_dense(2, weight=weight)
    num_rows, (num_tokens, channels), width = read.shape[0], x.shape, weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = tile_options(width, max_query_len)
    conv_update_kernel[(cdiv(channels, options["BLOCK_C"]), num_rows + 1)](
        x, weight, bias_or(weight, bias), conv_state, query_start_loc, read, offset, write, y,
        num_rows, num_tokens, max_query_len, x.stride(0), *conv_state.stride()[:2],
        CHANNELS=channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=is_silu(activation), **options,
    )  # fmt: skip
    return y
