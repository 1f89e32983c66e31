"""Windows of running requests to pages: one launch for all rows and layers; most rows have nothing to do.

Legend: E entries of a conv window, C conv channels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from bateleur.mamba.ops.shared.triton import LAUNCH, require_dense
from bateleur.mamba.ops.shared.triton_window import keep_window
from bateleur.metadata.forms import cdiv


@triton.jit
def window_kernel(
    conv_ptr, live_ptr, ring_row_ptr, dst_ptr, offset_ptr,
    conv_layer, conv_slot, conv_entry, live_layer, live_row, live_entry,
    KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of conv channels, rows, layers)."""
    tile, row, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dst = tl.load(dst_ptr + row).to(tl.int64)
    if dst == 0:
        return
    ring_row = tl.load(ring_row_ptr + row).to(tl.int64)
    keep_window(
        live_ptr + layer * live_layer + ring_row * live_row, conv_ptr + layer * conv_layer + dst * conv_slot,
        tl.load(offset_ptr + row), tile, live_entry, conv_entry, KEEP, CHANNELS, BLOCK_E, BLOCK_C,
    )  # fmt: skip


@cache
def tile_options(keep: int) -> dict[str, Any]:
    """Tile sizes and launch options of `window_kernel`; ``keep`` entries are a conv window."""
    return LAUNCH | {"BLOCK_E": triton.next_power_of_2(keep), "BLOCK_C": 512}


def fold_window(conv_state, live, ring_row, dst, page_offset):
    """See `bateleur.mamba.ops.fold_window`."""
    require_dense(1, conv_state=conv_state, live=live)
    layers, _, keep, channels = conv_state.shape
    options = tile_options(keep)
    window_kernel[(cdiv(channels, options["BLOCK_C"]), dst.shape[0], layers)](
        conv_state, live, ring_row, dst, page_offset, *conv_state.stride()[:3], *live.stride()[:3],
        KEEP=keep, CHANNELS=channels, **options,
    )  # fmt: skip
