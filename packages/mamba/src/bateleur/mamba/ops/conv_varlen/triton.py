"""The causal convolution of prefills: one kernel for the outputs, one for the conv windows after chunks and requests.

A row may write the slot that it reads, in another program. The first kernel therefore copies the initial windows of all
rows, and the second kernel reads the copies. Legend: T tokens of a tile, E entries of a window, C channels.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import (
    INDICES,
    LAUNCH,
    load_tile,
    require_dense,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.mamba.ops.shared.triton_conv import bias_or, convolve, inputs, is_silu
from bateleur.metadata.dispatch import cdiv


@triton.jit
def _find_row(starts_ptr, tile, num_rows, TILE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return a tile's row (request), and the row's first tile. Row ``num_rows`` has the tokens of no request."""
    row = -1
    first_tile = 0
    for begin in range(0, num_rows + 1, BLOCK_R):
        row_R = begin + tl.arange(0, BLOCK_R)
        start_R = tl.load(starts_ptr + row_R, mask=row_R <= num_rows, other=0)
        tile_R = start_R // TILE + row_R
        begun_R = (row_R <= num_rows) & (tile_R <= tile)
        row += tl.sum(begun_R.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(begun_R, tile_R, 0), 0))
    return row, first_tile


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=INDICES)
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, starts_ptr, read_ptr, kept_ptr, y_ptr,
    num_rows, num_tokens, x_token, conv_slot, conv_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of all prefills, and keep copies of their initial windows.

    Grid (requests + tiles of tokens, tiles of channels): the first programs copy windows, the others compute.
    Occupancy on sm_90: at least 3 blocks per SM.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real_C = c < CHANNELS
    row = tl.program_id(0)
    if row < num_rows:
        e = tl.arange(0, BLOCK_E)
        real_E = e < WIDTH - 1
        read = tl.load(read_ptr + row).to(tl.int64)
        read_C = c < unless_null(read, CHANNELS)
        kept_EC = load_tile(conv_ptr + read * conv_slot + c, e * conv_entry, real_E, read_C)
        store_tile(kept_ptr + c, (row.to(tl.int64) * (WIDTH - 1) + e) * CHANNELS, kept_EC, real_E, real_C)
        return
    tile = row - num_rows
    row, first_tile = _find_row(starts_ptr, tile, num_rows, BLOCK_T, 128)
    first = tl.load(starts_ptr + row)
    offset = (tile - first_tile) * BLOCK_T
    if row == num_rows:
        end = tl.minimum(first + offset + BLOCK_T, num_tokens)
        zero_tail(y_ptr, first + offset, end, CHANNELS, c, real_C)
        return
    count = tl.load(starts_ptr + row + 1) - first
    if offset >= count:
        return
    read = tl.load(read_ptr + row).to(tl.int64)
    position_T, token = offset + tl.arange(0, BLOCK_T), first.to(tl.int64)
    y_TC = convolve(
        x_ptr + token * x_token + c, conv_ptr + read * conv_slot + c, position_T, count,
        c < tl.where(offset < WIDTH, unless_null(read, CHANNELS), 0), real_C, x_token, conv_entry,
        weight_ptr + c * WIDTH, bias_ptr + c, WIDTH, HAS_BIAS, SILU,
    )  # fmt: skip
    store_tile(y_ptr + c, (token + position_T) * CHANNELS, y_TC, position_T < count, real_C)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=INDICES)
def window_kernel(
    x_ptr, conv_ptr, window_ptr, starts_ptr, kept_ptr, chunk_starts_ptr, chunk_row_ptr, chunk_write_ptr,
    window_write_ptr, num_chunks, x_token, conv_slot, conv_entry, window_row, window_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the conv window (last inputs) after each chunk and each request to its slot.

    Grid (chunks + requests with own conv window, tiles of channels). Occupancy on sm_90: at least 16 blocks per SM.
    """
    unit = tl.program_id(0)
    if unit < num_chunks:
        row = tl.load(chunk_row_ptr + unit).to(tl.int64)
        slot = tl.load(chunk_write_ptr + unit).to(tl.int64)
        begin, end = tl.load(chunk_starts_ptr + unit), tl.load(chunk_starts_ptr + unit + 1)
    else:
        row = (unit - num_chunks).to(tl.int64)
        slot = tl.load(window_write_ptr + row).to(tl.int64)
        begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (slot == 0) | (begin >= end):
        return
    e, c = tl.arange(0, BLOCK_E), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real_C = c < CHANNELS
    first = tl.load(starts_ptr + row)
    x_C, kept_C = x_ptr + first.to(tl.int64) * x_token + c, kept_ptr + row * (WIDTH - 1) * CHANNELS + c
    count = end - first
    last_E = count - (WIDTH - 1) + e
    left_EC = inputs(x_C, kept_C, last_E, count, real_C, real_C, x_token, CHANNELS, WIDTH - 1)
    if unit < num_chunks:
        store_tile(conv_ptr + slot * conv_slot + c, e * conv_entry, left_EC, e < WIDTH - 1, real_C)
    else:
        store_tile(window_ptr + slot * window_row + c, e * window_entry, left_EC, e < WIDTH - 1, real_C)


@cache
def tile_options(width: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `conv_kernel`; `window_kernel` takes them without BLOCK_T."""
    return LAUNCH | {"BLOCK_T": 16, "BLOCK_E": triton.next_power_of_2(max(1, width - 1)), "BLOCK_C": 128}


def causal_conv1d_varlen(
    x, weight, bias, conv_state, request_conv, query_start_loc, read, chunk_start_loc, chunk_row, chunk_write,
    request_conv_write, activation,
):  # fmt: skip
    """Convolve all prefills in two launches, and write conv windows after chunks and requests."""
    require_dense(1, x=x, conv_state=conv_state)
    require_dense(2, weight=weight)
    (num_tokens, channels), width = x.shape, weight.shape[1]
    num_rows, num_chunks = read.shape[0], chunk_row.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = torch.empty((num_rows, width - 1, channels), dtype=conv_state.dtype, device=x.device)
    options = tile_options(width)
    columns = cdiv(channels, options["BLOCK_C"])
    conv_kernel[(num_rows + num_tokens // options["BLOCK_T"] + num_rows + 1, columns)](
        x, weight, bias_or(weight, bias), conv_state, query_start_loc, read, kept, y,
        num_rows, num_tokens, x.stride(0), *conv_state.stride()[:2],
        CHANNELS=channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=is_silu(activation), **options,
    )  # fmt: skip
    units = num_chunks if request_conv is None else num_chunks + num_rows
    if units:
        if request_conv is None or request_conv_write is None:
            request_conv, request_conv_write = conv_state, chunk_write  # not read
        window_kernel[(units, columns)](
            x, conv_state, request_conv, query_start_loc, kept, chunk_start_loc, chunk_row, chunk_write,
            request_conv_write, num_chunks, x.stride(0), *conv_state.stride()[:2], *request_conv.stride()[:2],
            CHANNELS=channels, WIDTH=width, BLOCK_E=options["BLOCK_E"], BLOCK_C=options["BLOCK_C"], **LAUNCH,
        )  # fmt: skip
    return y
