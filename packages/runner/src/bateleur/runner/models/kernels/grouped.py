"""Grouped matrix products in Triton, for dtypes and devices that torch's product does not support without a host sync.

Only the device knows the number of rows of a group. So the grid has the maximum number of tiles, in which every group
starts a new tile of rows. Programs without a tile end at once.
Legend: S rows of a tile, N columns of the output, K columns of the input, E groups.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.metadata.dispatch import cdiv

_FEW_ROWS = 32  # mean rows per group; below, tiles have the minimum height of tensor cores


@triton.jit
def rows_of_tile(ends_ptr, tile, GROUPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the group of a tile of rows, the first row of the tile, and the end of the group's rows.

    ends_ptr: end of the rows of each group. The group is GROUPS for tiles after the last one.
    """
    e = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends_ptr + e, mask=e < GROUPS, other=0)
    begin_E = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < GROUPS), other=0)
    before_E = tl.cumsum((tl.maximum(end_E - begin_E, 0) + BLOCK_S - 1) // BLOCK_S, 0)  # tiles up to and with a group
    group = tl.minimum(tl.sum((before_E <= tile).to(tl.int32), 0), GROUPS)
    own_E = e == group
    end, begin = tl.sum(tl.where(own_E, end_E, 0), 0), tl.sum(tl.where(own_E, begin_E, 0), 0)
    first_tile = tl.max(tl.where(e < group, before_E, 0), 0)
    return group, begin + (tile - first_tile) * BLOCK_S, end


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    x_ptr, weight_ptr, ends_ptr, y_ptr, num_rows, x_row, weight_group, weight_row,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y: rows of x (num_rows, DEPTH) times the transpose of their group's matrix (COLUMNS, DEPTH).

    ends: end of each group's rows. x_row, weight_row, weight_group: strides of rows of x and weight, and of matrices.
    Grid (tiles of columns, tiles of rows). Occupancy on sm_90: at least 4 blocks per SM.
    """
    group, first_row, end = rows_of_tile(ends_ptr, tl.program_id(1), GROUPS, BLOCK_S, BLOCK_E)
    if group >= GROUPS:
        return
    row_S = first_row + tl.arange(0, BLOCK_S)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_S, real_N = row_S < tl.minimum(end, num_rows), n < COLUMNS
    x_S = x_ptr + row_S.to(tl.int64) * x_row
    weight_N = weight_ptr + group.to(tl.int64) * weight_group + n.to(tl.int64) * weight_row
    y_SN = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        real_K = k < DEPTH
        x_SK = tl.load(x_S[:, None] + k[None, :], mask=real_S[:, None] & real_K[None, :], other=0)
        weight_KN = tl.load(weight_N[None, :] + k[:, None], mask=real_K[:, None] & real_N[None, :], other=0)
        y_SN = tl.dot(x_SK, weight_KN, y_SN, input_precision=PRECISION)
    y_at_SN = y_ptr + row_S.to(tl.int64)[:, None] * COLUMNS + n[None, :]
    tl.store(y_at_SN, y_SN.to(y_ptr.dtype.element_ty), mask=real_S[:, None] & real_N[None, :])


def tile_options(num_rows: int, num_groups: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return tile sizes and launch options of `grouped_kernel`: two sets per layer, for few and many rows per group."""
    full, many = dtype == torch.float32, num_rows >= _FEW_ROWS * num_groups
    sizes = {"BLOCK_S": 64 if many else 16, "BLOCK_N": 64, "BLOCK_K": 32 if full else 64}
    options = {"PRECISION": "ieee", "num_warps": 4, "num_stages": 2 if full else 3, "enable_fp_fusion": True}
    return {**sizes, "BLOCK_E": triton.next_power_of_2(num_groups), **options}


def grouped_products(x, weight, group_ends):
    """Compute `models.grouped.grouped_product` by a Triton kernel, with the same arguments and result."""
    (num_rows, depth), (groups, columns) = x.shape, weight.shape[:2]
    y = x.new_empty(num_rows, columns)
    options = tile_options(num_rows, groups, x.dtype)
    tiles = num_rows // options["BLOCK_S"] + min(groups, num_rows)
    grouped_kernel[(cdiv(columns, options["BLOCK_N"]), tiles)](
        x, weight, group_ends, y, num_rows, x.stride(0), *weight.stride()[:2],
        GROUPS=groups, COLUMNS=columns, DEPTH=depth, **options,
    )  # fmt: skip
    return y
