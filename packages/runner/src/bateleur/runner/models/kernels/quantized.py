"""Triton kernels of products with quantised matrices. They dequantise codes in registers.

A product is computed as W x^T: rows of W fill the 64 rows of a tensor core instruction even for one token. The
columns of W are cut into parts, whose sizes depend on W alone. The sums of parts are added in order: by `sum_kernel`
for few tokens, in one program for many, and by `kernels.dequantized` for many in half precision. So the bits of a token
do not depend on other tokens; on a GPU, the check "bits" of `benchmarks.gpu kernels:quantized` compares them.
Legend: T tokens of a tile, N rows of W, K columns, G groups of columns with one scale each, E groups of rows of x.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from bateleur.metadata.dispatch import cdiv
from bateleur.runner.models.kernels import dequantized
from bateleur.runner.models.kernels.dequantized import weight_tile
from bateleur.runner.models.kernels.grouped import rows_of_tile
from bateleur.runner.models.quantized import PACKED, QuantizedMatrix, Scheme

_ROWS = 64  # rows of W in a tile for few tokens: the smallest tile of Hopper's tensor cores
_PROGRAMS = 264  # programs to reach by cutting columns, if W has few rows: two per multiprocessor of an H100
_PART = 512  # least columns of a part
_BLOCK = 128  # columns of a tile
_LEAST = 32  # average rows of x per expert; with fewer, tiles have 16 tokens
_FEW, _MANY = 16, 256  # above these numbers of tokens, tiles have 64 tokens, and `kernels.dequantized` is used


@triton.jit
def product_tile(
    codes_N, scales_N, zeros_N, factor_N1, index_ptr, x_T, real_T, begin, end,
    LAYOUT: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, INDEXED: tl.constexpr, DIVIDES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return the product of a tile of W and a tile of tokens, (N, T) float32 sums over the columns [begin, end).

    Pointers and constants: see `weight_tile`. x_T: pointers to tokens; real_T: False for padding.
    W is an operand in registers. Adding 0 to the sum makes Triton wait for the product before the next tile:
    Triton 3.6 would overwrite the operand of a running product (triton-lang/triton#9433), except in float32.
    """
    sum_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for first in range(begin, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_KT = tl.load(x_T[None, :] + k[:, None], mask=(k[:, None] < DEPTH) & real_T[None, :], other=0)
        w_NK = weight_tile(
            codes_N, scales_N, zeros_N, factor_N1, index_ptr, first,
            LAYOUT, DEPTH, GROUPS, GROUP, WIDTH, START, INDEXED, DIVIDES, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        sum_NT = tl.dot(w_NK.to(x_KT.dtype), x_KT, sum_NT, input_precision="ieee")
        if x_KT.dtype != tl.float32:
            sum_NT += 0.0
    return sum_NT


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, factors_ptr, index_ptr, bias_ptr, y_ptr, num_tokens, x_row,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, INDEXED: tl.constexpr, DIVIDES: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, APART: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `x W^T + b`, y (T, ROWS). W: (ROWS, DEPTH), with the tensors of a `QuantizedMatrix`.

    If APART, y is (PARTS, T, ROWS) float32, sums over PART columns each, which `sum_kernel` adds. Other constants: see
    `_constants`. Grid (tiles of rows of W, tiles of tokens, parts of columns if APART).
    Occupancy on sm_90: at least 1 block per SM.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T, own = t < num_tokens, tl.minimum(n, ROWS - 1).to(tl.int64)
    bytes_of_row: tl.constexpr = (DEPTH + 1) // 2 if LAYOUT == "I4" or LAYOUT == "F4" or LAYOUT == "MX4" else DEPTH
    codes_N, scales_N, zeros_N, factor_N1 = (codes_ptr + own * bytes_of_row, scales_ptr + own * GROUPS, None, None)
    if zeros_ptr is not None:
        zeros_N = zeros_ptr + own * GROUPS
    if factors_ptr is not None:
        factor_N1 = tl.load(factors_ptr + own)[:, None]
    x_T = x_ptr + t.to(tl.int64) * x_row
    y_NT = y_ptr + t.to(tl.int64)[None, :] * ROWS + n[:, None]
    real_NT = (n[:, None] < ROWS) & real_T[None, :]
    if APART:
        part = tl.program_id(2)
        sum_NT = product_tile(
            codes_N, scales_N, zeros_N, factor_N1, index_ptr, x_T, real_T,
            part * PART, tl.minimum(part * PART + PART, DEPTH),
            LAYOUT, DEPTH, GROUPS, GROUP, WIDTH, START, INDEXED, DIVIDES, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
        tl.store(y_NT + part.to(tl.int64) * num_tokens * ROWS, sum_NT, mask=real_NT)
        return
    sum_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for part in range(PARTS):
        sum_NT += product_tile(
            codes_N, scales_N, zeros_N, factor_N1, index_ptr, x_T, real_T,
            part * PART, tl.minimum(part * PART + PART, DEPTH),
            LAYOUT, DEPTH, GROUPS, GROUP, WIDTH, START, INDEXED, DIVIDES, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    if bias_ptr is not None:
        sum_NT += tl.load(bias_ptr + own).to(tl.float32)[:, None]
    tl.store(y_NT, sum_NT.to(y_ptr.dtype.element_ty), mask=real_NT)


@triton.jit(do_not_specialize=["part_size"])
def sum_kernel(parts_ptr, bias_ptr, y_ptr, part_size, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add the sums (PARTS, T, N) over parts of the columns in order, add the bias, and write y (T, N).

    ROWS: N. part_size: T * N. Grid (tokens, tiles of rows). Occupancy on sm_90: at least 12 blocks per SM.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, real = tl.program_id(0).to(tl.int64) * ROWS + n, n < ROWS
    total = tl.zeros([BLOCK_N], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + part * part_size + at, mask=real, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    x_ptr, ends_ptr, codes_ptr, scales_ptr, zeros_ptr, factors_ptr, y_ptr, num_rows, x_row,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, DIVIDES: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product of rows of x and the dequantised matrix (ROWS, DEPTH) of their expert.

    ends: end of each expert's rows of x. Other pointers: tensors of a `QuantizedMatrix`. Constants: see `_constants`.
    Grid (tiles of rows of W, tiles of rows of x); see `kernels.grouped`. Occupancy on sm_90: at least 1 block per SM.
    """
    expert, first_row, end = rows_of_tile(ends_ptr, tl.program_id(1), EXPERTS, BLOCK_T, BLOCK_E)
    if expert >= EXPERTS:
        return
    n, t = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), first_row + tl.arange(0, BLOCK_T)
    real_T = t < tl.minimum(end, num_rows)
    own = expert.to(tl.int64) * ROWS + tl.minimum(n, ROWS - 1)
    bytes_of_row: tl.constexpr = (DEPTH + 1) // 2 if LAYOUT == "I4" or LAYOUT == "F4" or LAYOUT == "MX4" else DEPTH
    codes_N, scales_N, zeros_N, factor_N1 = (codes_ptr + own * bytes_of_row, scales_ptr + own * GROUPS, None, None)
    if zeros_ptr is not None:
        zeros_N = zeros_ptr + own * GROUPS
    if factors_ptr is not None:
        factor_N1 = tl.load(factors_ptr + own)[:, None]
    x_T = x_ptr + t.to(tl.int64) * x_row
    sum_NT = product_tile(
        codes_N, scales_N, zeros_N, factor_N1, None, x_T, real_T, 0, DEPTH,
        LAYOUT, DEPTH, GROUPS, GROUP, WIDTH, START, False, DIVIDES, BLOCK_N, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    y_NT = y_ptr + t.to(tl.int64)[None, :] * ROWS + n[:, None]
    tl.store(y_NT, sum_NT.to(y_ptr.dtype.element_ty), mask=(n[:, None] < ROWS) & real_T[None, :])


def tile_options(num_tokens: int, dtype: torch.dtype, group: int) -> dict[str, Any]:
    """Return tile sizes and launch options, one of three sets by number of tokens. group: GROUP of `_constants`.

    All sets have the same BLOCK_K, because the rounding of sums depends on it.
    """
    full = dtype == torch.float32
    wide = num_tokens > _MANY and not full
    return {
        "BLOCK_T": 16 if num_tokens <= _FEW or (full and group == 32) else 32 if full else 64,
        "BLOCK_N": 2 * _ROWS if wide else _ROWS,
        "BLOCK_K": 16 if full and group in (0, 32) else 32 if full or group == 0 else _BLOCK,
        "num_warps": 8 if wide or (full and num_tokens > _FEW) else 4,
        "num_stages": 2 if full else 3,
        "enable_fp_fusion": False,  # a fused multiplication with a zero point would round otherwise
    }


def cut(rows: int, columns: int) -> tuple[int, int]:
    """Return the number of parts that the columns of W (rows, columns) are cut into, and the columns of a part."""
    parts = max(1, min(_PROGRAMS // cdiv(rows, _ROWS), columns // _PART))
    size = cdiv(cdiv(columns, parts), _BLOCK) * _BLOCK
    return cdiv(columns, size), size


def _constants(scheme: Scheme, columns: int, groups: int) -> dict[str, Any]:
    """Return the compile-time constants of `linear_kernel` and `grouped_kernel`.

    LAYOUT, DIVIDES: fields of the scheme; the caller of `linear_kernel` adds INDEXED. DEPTH: columns of a matrix.
    GROUPS: `groups`, the scale groups of a row. WIDTH, START: `group` and `start` of the scheme; `columns` and 0 if a
    row has one group. GROUP says how kernels load the scales of a tile of columns. It is 1 << 30 if all columns of a
    row have one scale. It is WIDTH if each group of WIDTH columns has one scale, WIDTH is a divisor or a multiple of
    128, and START is 0. In all other cases, and if groups are indexed, it is 0: each column's scale is loaded
    separately.
    """
    width, start = (columns, 0) if groups == 1 else (scheme.group, scheme.start)
    one = groups == 1 and not scheme.indexed
    whole = not scheme.indexed and start == 0 and (width % _BLOCK == 0 or _BLOCK % width == 0)
    sizes = {"DEPTH": columns, "GROUPS": groups, "GROUP": 1 << 30 if one else width if whole else 0}
    return {"LAYOUT": scheme.layout.value, **sizes, "WIDTH": width, "START": start, "DIVIDES": scheme.divides}


def quantized_linear(x, parts, scheme, bias):
    """Compute `models.quantized.quantized_linear` by Triton kernels, with the same arguments and result."""
    (tokens, columns), (rows, groups) = x.shape, parts[1].shape
    matrix, y = QuantizedMatrix.of(scheme, columns, parts), x.new_empty(tokens, rows)
    x = x if x.stride(1) == 1 else x.contiguous()
    constants = _constants(matrix.scheme, columns, groups)
    options = tile_options(tokens, x.dtype, constants["GROUP"])
    count, size = cut(rows, columns)
    if tokens > _MANY and x.dtype != torch.float32:
        dequantized.linear(x, matrix, constants, (count, size), bias, y)
        return y
    apart = count > 1 and tokens <= _MANY
    into = x.new_empty(count, tokens, rows, dtype=torch.float32) if apart else y
    grid = cdiv(rows, options["BLOCK_N"]), cdiv(tokens, options["BLOCK_T"]), count if apart else 1
    linear_kernel[grid](
        x, matrix.codes, matrix.scales, matrix.zeros, matrix.factors, matrix.index, None if apart else bias, into,
        tokens, x.stride(0),
        ROWS=rows, INDEXED=matrix.scheme.indexed, PARTS=count, PART=size, APART=apart,
        **constants, **options,
    )  # fmt: skip
    if apart:
        sum_kernel[tokens, cdiv(rows, 512)](
            into, bias, y, tokens * rows, ROWS=rows, PARTS=count, BLOCK_N=512, num_warps=4, enable_fp_fusion=True
        )
    return y


def quantized_grouped(x, ends, parts, scheme):
    """Compute `models.grouped.quantized_grouped` by a Triton kernel, with the same arguments and result."""
    (tokens, columns), (experts, rows, groups) = x.shape, parts[1].shape
    matrix, y = QuantizedMatrix.of(scheme, columns, parts), x.new_empty(tokens, rows)
    constants, many = _constants(matrix.scheme, columns, groups), tokens >= _LEAST * experts
    options = tile_options(cdiv(tokens, experts) if many else 1, x.dtype, constants["GROUP"])
    tiles = tokens // options["BLOCK_T"] + min(experts, tokens)
    grouped_kernel[cdiv(rows, options["BLOCK_N"]), tiles](
        x, ends, matrix.codes, matrix.scales, matrix.zeros, matrix.factors, y, tokens, x.stride(0),
        ROWS=rows, EXPERTS=experts, BLOCK_E=triton.next_power_of_2(experts),
        **constants, **options,
    )  # fmt: skip
    return y


assert {each.value for each in PACKED} == {"I4", "F4", "MX4"}, "kernels name the layouts with two codes a byte"
