"""The causal convolution of decodes, in one kernel, and of prefills, in two.

The first kernel of prefills computes the outputs, the second one writes the conv windows after chunks and requests. A
row may write the slot that it reads, in another program. The first kernel therefore copies the initial windows of all
rows, and the second kernel reads the copies.

Legend: T tokens of a row or tile, E entries of a window, C channels of a tile.
"""

import torch
import triton
import triton.language as tl

from bateleur.mamba.ops.conv import is_silu
from bateleur.mamba.ops.triton.tiles import (
    INDICES,
    LAUNCH,
    load_tile,
    require_dense,
    silu,
    store_tile,
    unless_null,
    zero_tail,
)
from bateleur.metadata.dispatch import cdiv, next_power_of_2

_BLOCK_T, _BLOCK_C = 16, 128  # tile of tokens and channels of prefills


@triton.jit
def inputs(x_C, window_C, position_E, count, window_C_real, real_C, x_token, entry, KEEP: tl.constexpr):
    """Load raw inputs (E, C) at ``position_E`` of a request of ``count`` tokens, in float32; zeros after the end.

    ``x_C`` points to the request's first token, ``window_C`` to the first of the ``KEEP`` inputs before it (conv
    window), both by channel. Position -1 is the last window entry. If ``window_C_real`` is false, the window is zero
    and is not read. ``x_token`` and ``entry`` are strides of tokens and window entries, ``real_C`` masks channels.
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
    """Return the convolution (T, C), in float32, of the tokens ``position_T`` (from 0) of a request of ``count``
    tokens.

    By channel, ``weight_C`` and ``bias_C`` point to weights and bias, ``x_C`` to the first token, ``window_C`` to the
    first of the WIDTH - 1 inputs before it (0 where ``window_C_real`` is false). x_token, entry: strides. real_C: mask.
    """
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


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_query_len"])
def conv_update_kernel(
    x_ptr, weight_ptr, bias_ptr, conv_ptr, starts_ptr, read_ptr, offset_ptr, write_ptr, y_ptr,
    num_rows, num_tokens, max_query_len, x_token, conv_slot, conv_entry,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of each decode, and write the conv window (last inputs) after them.

    Grid (tiles of channels, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 7 blocks per SM. Pointers: arguments of `ops.causal_conv1d_update` (starts:
    `query_start_loc`; read, write: state slots; offset: first entry of the old window). Writes y and conv.
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


def causal_conv1d_update(
    x, weight, bias, conv_state, query_start_loc, max_query_len, read, offset, write, activation,
):  # fmt: skip
    """Convolve decodes, windows from slots ``read`` (entry ``offset``) to ``write``, as `ops.causal_conv1d_update`."""
    require_dense(1, x=x, conv_state=conv_state)
    require_dense(2, weight=weight)
    num_rows, (num_tokens, channels), width = read.shape[0], x.shape, weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_e = next_power_of_2(max(1, width - 2 + max_query_len))
    block_c = max(64, min(256, 2048 // block_e))
    conv_update_kernel[(cdiv(channels, block_c), num_rows + 1)](
        x, weight, weight if bias is None else bias, conv_state, query_start_loc, read, offset, write, y,
        num_rows, num_tokens, max_query_len, x.stride(0), *conv_state.stride()[:2],
        CHANNELS=channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=is_silu(activation),
        BLOCK_T=next_power_of_2(max_query_len), BLOCK_E=block_e, BLOCK_C=block_c, **LAUNCH,
    )  # fmt: skip
    return y


@triton.jit
def _find_row(starts_ptr, tile, num_rows, TILE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the row (request) of the tile with index ``tile``, and the index of the row's first tile.

    Tiles of TILE tokens are numbered over all rows. Row ``num_rows`` stands for the tokens after the last request.
    ``starts_ptr``: `query_start_loc`. BLOCK_R: number of rows that are searched at once.
    """
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
    """Convolve the tokens of all prefills, and keep copies of their initial windows (inputs before the first token).

    Grid (requests + tiles of tokens, tiles of channels): the first programs copy windows, the others compute.
    Occupancy on sm_90: at least 3 blocks per SM. Reads arguments of `ops.causal_conv1d_varlen` (starts:
    `query_start_loc`; read: state slots of initial windows). Writes outputs to ``y_ptr``, and copies of windows to
    ``kept_ptr``.
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
    """Write the conv window (last inputs) after each chunk to a state slot, and after each request to its request row.

    Grid (chunks + requests with own conv window, tiles of channels). Occupancy on sm_90: at least 16 blocks per SM.
    Pointers: arguments of `ops.causal_conv1d_varlen` (starts: `query_start_loc`, window: `request_conv`), and the
    initial windows ``kept_ptr`` (from `conv_kernel`). Writes conv (chunks) and window (requests).
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


def causal_conv1d_varlen(
    x, weight, bias, conv_state, request_conv, query_start_loc, read, chunk_start_loc, chunk_row, chunk_write,
    request_conv_write, activation,
):  # fmt: skip
    """Convolve prefill tokens in two launches; same arguments and result as `ops.causal_conv1d_varlen`."""
    require_dense(1, x=x, conv_state=conv_state)
    require_dense(2, weight=weight)
    (num_tokens, channels), width = x.shape, weight.shape[1]
    num_rows, num_chunks = read.shape[0], chunk_row.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept = torch.empty((num_rows, width - 1, channels), dtype=conv_state.dtype, device=x.device)
    options = LAUNCH | {"BLOCK_E": next_power_of_2(max(1, width - 1)), "BLOCK_C": _BLOCK_C}
    columns = cdiv(channels, _BLOCK_C)
    conv_kernel[(num_rows + num_tokens // _BLOCK_T + num_rows + 1, columns)](
        x, weight, weight if bias is None else bias, conv_state, query_start_loc, read, kept, y,
        num_rows, num_tokens, x.stride(0), *conv_state.stride()[:2],
        CHANNELS=channels, WIDTH=width, HAS_BIAS=bias is not None, SILU=is_silu(activation), BLOCK_T=_BLOCK_T,
        **options,
    )  # fmt: skip
    units = num_chunks if request_conv is None else num_chunks + num_rows
    if units:
        if request_conv is None or request_conv_write is None:
            request_conv, request_conv_write = conv_state, chunk_write  # not read
        window_kernel[(units, columns)](
            x, conv_state, request_conv, query_start_loc, kept, chunk_start_loc, chunk_row, chunk_write,
            request_conv_write, num_chunks, x.stride(0), *conv_state.stride()[:2], *request_conv.stride()[:2],
            CHANNELS=channels, WIDTH=width, **options,
        )  # fmt: skip
    return y
