"""Copies conv windows of running requests to state slots: one launch for all requests and layers.

Most requests have no copy (`dst` is 0), so programs skip them: see `rows_of_share`.
Legend: E entries of a conv window, C conv channels, R rows (requests).
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import LAUNCH, next_row, require_dense, row_shares, rows_of_share
from bateleur.mamba.ops.shared.triton_conv import keep_window
from bateleur.metadata.dispatch import cdiv


@triton.jit(do_not_specialize=["num_rows"])
def window_kernel(
    conv_ptr, window_ptr, ring_row_ptr, dst_ptr, offset_ptr,
    conv_layer, conv_slot, conv_entry, window_layer, window_row, window_entry, num_rows,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Copy conv windows of running requests to state slots. Grid (tiles of conv channels, groups of requests, layers).

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


@cache
def tile_options(keep: int) -> dict[str, Any]:
    """Return tile sizes and launch options of `window_kernel`; keep: entries of a conv window."""
    return LAUNCH | {"BLOCK_E": triton.next_power_of_2(keep), "BLOCK_C": 512, "BLOCK_R": 256}


def fold_window(conv_state, request_conv, ring_row, dst, page_offset):
    """Copy conv windows of running requests to state slots, in one launch for all layers."""
    require_dense(1, conv_state=conv_state, request_conv=request_conv)
    layers, _, keep, channels = conv_state.shape
    options = tile_options(keep)
    tiles, num_rows = cdiv(channels, options["BLOCK_C"]), dst.shape[0]
    window_kernel[(tiles, row_shares(num_rows, tiles * layers), layers)](
        conv_state, request_conv, ring_row, dst, page_offset, *conv_state.stride()[:3], *request_conv.stride()[:3],
        num_rows, KEEP=keep, CHANNELS=channels, **options,
    )  # fmt: skip
