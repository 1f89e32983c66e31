"""Copies of states and conv windows between slots: one launch for all requests and layers.

Most requests have no copy (`dst` is 0), so programs skip them: see `rows_of_share`.
Legend: E entries of a conv window, C conv channels, S entries of a state, R rows (requests).
"""

import triton
import triton.language as tl

from bateleur.mamba.ops.triton.tiles import (
    LAUNCH,
    keep_window,
    load_tile,
    next_row,
    require_dense,
    row_shares,
    rows_of_share,
    store_tile,
    unless_null,
)
from bateleur.metadata.dispatch import cdiv, next_power_of_2

_MOST_PROGRAMS = 32  # per row, for the SSM state


@triton.jit(do_not_specialize=["num_rows"])
def copy_kernel(
    conv_ptr, ssm_ptr, conv_src_ptr, bias_ptr, ssm_src_ptr, dst_ptr,
    conv_layer, conv_slot, conv_entry, ssm_layer, ssm_slot, num_rows,
    ENTRIES: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Copy conv windows and SSM states between state slots.

    Grid (parts of the state + tiles of conv channels, groups of requests, layers).
    Occupancy on sm_90: at least 9 blocks per SM. Pointers: arguments of `ops.copy_states` (src, dst: slots; bias:
    `conv_bias`, first window entry to copy). Reads and writes conv and ssm.
    """
    part, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    conv_ptr += layer * conv_layer
    ssm_ptr += layer * ssm_layer
    for begin in range(0, num_rows, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        dst_R = rows_of_share(dst_ptr, r, num_rows)
        row = next_row(dst_R, r, -1)
        while row < num_rows:
            dst = tl.load(dst_ptr + row).to(tl.int64)
            if part < PARTS:
                src = tl.load(ssm_src_ptr + row).to(tl.int64)
                size = tl.where(src == dst, 0, SIZE)  # nothing to copy
                for first in range(part * BLOCK_S, size, PARTS * BLOCK_S):
                    s = first + tl.arange(0, BLOCK_S)
                    state_S = tl.load(ssm_ptr + src * ssm_slot + s, mask=s < unless_null(src, SIZE), other=0)
                    tl.store(ssm_ptr + dst * ssm_slot + s, state_S, mask=s < SIZE)
            else:
                src, bias = tl.load(conv_src_ptr + row).to(tl.int64), tl.load(bias_ptr + row).to(tl.int32)
                e, c = tl.arange(0, BLOCK_E), (part - PARTS) * BLOCK_C + tl.arange(0, BLOCK_C)
                moved_E, read_C = e < ENTRIES - bias, c < unless_null(src, CHANNELS)
                window_EC = load_tile(conv_ptr + src * conv_slot + c, (e + bias) * conv_entry, moved_E, read_C)
                tl.debug_barrier()  # source and destination may be one slot
                store_tile(conv_ptr + dst * conv_slot + c, e * conv_entry, window_EC, moved_E, c < CHANNELS)
            row = next_row(dst_R, r, row)


def copy_states(conv_state, ssm_state, conv_src, conv_bias, ssm_src, dst):
    """Copy conv windows and SSM states to slots ``dst`` (0: none), in one launch; arguments of `ops.copy_states`."""
    require_dense(1, conv_state=conv_state)
    layers, _, entries, channels = conv_state.shape
    size, strides = 0, (0, 0)  # no SSM states
    if ssm_state is not None:
        require_dense(3, ssm_state=ssm_state)
        size, strides = ssm_state.shape[2:].numel(), ssm_state.stride()[:2]
    block_s, block_c, num_rows = min(4096, next_power_of_2(max(1, size))), 256, dst.shape[0]
    of_state = min(_MOST_PROGRAMS, cdiv(size, block_s))
    parts = of_state + cdiv(channels, block_c)
    copy_kernel[(parts, row_shares(num_rows, parts * layers), layers)](
        conv_state, conv_state if ssm_state is None else ssm_state, conv_src, conv_bias, ssm_src, dst,
        *conv_state.stride()[:3], *strides, num_rows,
        ENTRIES=entries, CHANNELS=channels, SIZE=size, PARTS=of_state, BLOCK_E=next_power_of_2(entries),
        BLOCK_C=block_c, BLOCK_S=block_s, BLOCK_R=256, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def window_kernel(
    conv_ptr, window_ptr, ring_row_ptr, dst_ptr, offset_ptr,
    conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry, num_rows,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Copy conv windows of running requests to state slots. Grid (tiles of conv channels, groups of requests, layers).

    Reads window (`request_conv`): its row ring_row, from entry offset on. Writes slot dst of conv; nothing if dst is 0.
    Occupancy on sm_90: at least 16 blocks per SM.
    """
    tile, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    for begin in range(0, num_rows, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        dst_R = rows_of_share(dst_ptr, r, num_rows)
        row = next_row(dst_R, r, -1)
        while row < num_rows:
            dst, ring_row = tl.load(dst_ptr + row).to(tl.int64), tl.load(ring_row_ptr + row).to(tl.int64)
            keep_window(
                window_ptr + layer * window_layer + ring_row * window_row,
                conv_ptr + layer * conv_layer + dst * conv_slot,
                tl.load(offset_ptr + row), tile, window_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
            )  # fmt: skip
            row = next_row(dst_R, r, row)


def fold_window(conv_state, request_conv, ring_row, dst, page_offset):
    """Copy conv windows of running requests to state slots ``dst`` (0: none) in all layers, as `ops.fold_window`.
    A window is read from row ``ring_row`` of ``request_conv``, from entry ``page_offset`` on.
    """
    require_dense(1, conv_state=conv_state, request_conv=request_conv)
    layers, _, keep, channels = conv_state.shape
    block_c, num_rows = 512, dst.shape[0]
    tiles = cdiv(channels, block_c)
    window_kernel[(tiles, row_shares(num_rows, tiles * layers), layers)](
        conv_state, request_conv, ring_row, dst, page_offset, *conv_state.stride()[:3], *request_conv.stride()[:3],
        num_rows, KEEP=keep, CHANNELS=channels, BLOCK_E=next_power_of_2(keep), BLOCK_C=block_c, BLOCK_R=256,
        **LAUNCH,
    )  # fmt: skip
