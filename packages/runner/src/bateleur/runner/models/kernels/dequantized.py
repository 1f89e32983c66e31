"""Products of many tokens with quantised matrices: Triton kernels that dequantise a matrix once, then multiply.

`kernels.quantized` would dequantise a tile of W again for every tile of tokens. Both modules add sums in the same order
and have the same legend.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from bateleur.metadata.dispatch import cdiv
from bateleur.runner.models.quantized import QuantizedMatrix

WORKSPACE = 1 << 27
"""Largest number of weights that are dequantised at once: 256 MiB."""
BLOCK = 64
"""Columns of a tile; rows of dequantised weights are padded with zeros to a multiple."""


@triton.jit
def e4m3(bits):
    """Convert bits of float8 e4m3 to float32, by an instruction on GPUs from sm_89 on, else by shifting bits."""
    if cuda_capability_geq(8, 9):
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def int4(codes, MIDDLE: tl.constexpr):
    """Return the low and the high nibbles of codes, minus MIDDLE, in float32.

    Nibbles become the last bits of the floats 2^23 and 2^19, because conversions of integers are slow.
    """
    bits = codes.to(tl.int32)
    low, high = (bits & 0x0F) | 0x4B000000, (bits & 0xF0) | 0x49000000
    return low.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE), high.to(tl.float32, bitcast=True) - (
        524288.0 + MIDDLE
    )


@triton.jit
def e2m1(codes):
    """Return 2^-14 times the e2m1 numbers in the low and in the high nibbles of codes, in float32."""
    bits = codes.to(tl.int32)
    bits |= bits << 12
    halves = ((bits << 12) & -0x7FFF8000) | ((bits << 9) & 0x0E000E00)
    low, high = halves.to(tl.int16), (halves >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def of_columns(row_N, k, first, group_K,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the scales (or zeros) of a tile of W, N rows and K columns k from `first` on. `by_column` broadcasts them.

    row_N: pointers to the first of GROUPS scales of each row. GROUP: columns with one scale; 0: column k has the scale
    with index group_K[k].
    Returns (N, K) if GROUP is 0, (N, 1) if one scale of a row is enough for the tile, else (N, K / GROUP).
    """
    if GROUP == 0:
        return tl.load(row_N[:, None] + group_K[None, :])
    elif GROUP % BLOCK_K == 0:
        return tl.load(row_N + first // GROUP)[:, None]
    else:
        g = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
        return tl.load(row_N[:, None] + g[None, :], mask=g[None, :] < GROUPS, other=0)


@triton.jit
def by_column(values_NK, table, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Broadcast the scales (or zeros) `table` that `of_columns` loaded to the shape (N, K) of values_NK."""
    if GROUP == 0 or GROUP % BLOCK_K == 0:
        return table + tl.zeros_like(values_NK)
    else:
        wide = tl.broadcast_to(table[:, :, None], [BLOCK_N, BLOCK_K // GROUP, GROUP])
        return tl.reshape(wide, [BLOCK_N, BLOCK_K])


@triton.jit
def weight_tile(
    codes_N, scales_N, zeros_N, factor_N1, index_ptr, first,
    LAYOUT: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, INDEXED: tl.constexpr, DIVIDES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile (N, K) of dequantised weights, float32, whose columns begin at `first`.

    codes_N, scales_N, zeros_N: pointers to rows of `QuantizedMatrix`. factor_N1: row factors of NVFP4 (layout F4).
    Constants: see `quantized._constants`. Columns after the matrix's last have arbitrary finite values.
    Column k has scale group (k + START) // WIDTH, or index[k] if INDEXED.
    """
    k = first + tl.arange(0, BLOCK_K)
    if LAYOUT == "I4" or LAYOUT == "F4" or LAYOUT == "MX4":
        at = first // 2 + tl.arange(0, BLOCK_K // 2)
        raw = tl.load(codes_N[:, None] + at[None, :], mask=at[None, :] < (DEPTH + 1) // 2, other=0)
        if LAYOUT == "I4":
            low, high = int4(raw, 0 if zeros_N is not None else 8)
        else:
            low, high = e2m1(raw)
        w_NK = tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K])
    else:
        raw = tl.load(codes_N[:, None] + k[None, :], mask=k[None, :] < DEPTH, other=0)
        w_NK = e4m3(raw) if LAYOUT == "F8" else raw.to(tl.float32)
    group_K = tl.minimum((k + START) // WIDTH, GROUPS - 1)
    if INDEXED:
        group_K = tl.load(index_ptr + k, mask=k < DEPTH, other=0)
    scale = of_columns(scales_N, k, first, group_K, GROUPS, GROUP, BLOCK_N, BLOCK_K)
    if LAYOUT == "F4":
        scale = e4m3(scale)
        if DIVIDES:
            scale = tl.div_rn(scale, factor_N1 + tl.zeros_like(scale))
        else:
            scale *= factor_N1
        scale *= 16384.0
    elif LAYOUT == "MX4":
        exponent = scale.to(tl.int32)
        scale = (tl.maximum(exponent << 1, 1) << 22).to(tl.float32, bitcast=True)  # 0 is 2^-127, a subnormal
        w_NK *= 16384.0  # the product of the largest scale and 2^14 would overflow
    else:
        scale = scale.to(tl.float32)
    if zeros_N is not None:
        zero = of_columns(zeros_N, k, first, group_K, GROUPS, GROUP, BLOCK_N, BLOCK_K).to(tl.float32)
        w_NK -= by_column(w_NK, zero, GROUP, BLOCK_N, BLOCK_K)
    return w_NK * by_column(w_NK, scale, GROUP, BLOCK_N, BLOCK_K)


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, factors_ptr, index_ptr, w_ptr,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, START: tl.constexpr, INDEXED: tl.constexpr, DIVIDES: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a tile of dequantised weights to w (N, PADDED), with zeros after the last column.

    Pointers: tensors of a `QuantizedMatrix`. Constants: ROWS is N; others see `quantized._constants`.
    Grid (tiles of rows, tiles of columns). Occupancy on sm_90: at least 4 blocks per SM.
    """
    n, first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_K
    own, k = tl.minimum(n, ROWS - 1).to(tl.int64), first + tl.arange(0, BLOCK_K)
    bytes_of_row: tl.constexpr = (DEPTH + 1) // 2 if LAYOUT == "I4" or LAYOUT == "F4" or LAYOUT == "MX4" else DEPTH
    zeros_N, factor_N1 = None, None
    if zeros_ptr is not None:
        zeros_N = zeros_ptr + own * GROUPS
    if factors_ptr is not None:
        factor_N1 = tl.load(factors_ptr + own)[:, None]
    w_NK = weight_tile(
        codes_ptr + own * bytes_of_row, scales_ptr + own * GROUPS, zeros_N, factor_N1, index_ptr, first,
        LAYOUT, DEPTH, GROUPS, GROUP, WIDTH, START, INDEXED, DIVIDES, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    w_NK = tl.where(k[None, :] < DEPTH, w_NK, 0.0).to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + own[:, None] * PADDED + k[None, :], w_NK, mask=(n[:, None] < ROWS) & (k[None, :] < PADDED))


@triton.jit(do_not_specialize=["num_tokens"])
def dense_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, num_tokens, x_row, y_row,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `x W^T + b` for dequantised w (N, PADDED). y: (T, N) with rows that are `y_row` apart.

    Grid (tiles of rows x tiles of tokens): BAND tiles of rows for all tokens are consecutive, so that they stay in
    the L2 cache. ROWS is N. DEPTH: K, the columns before padding. The columns are cut into PARTS parts of PART columns
    each, see `kernels.quantized`.
    Both operands of a product are read from shared memory, so the products of consecutive tiles of columns overlap.
    Only after a part does the kernel wait for a product, because it adds the sum of the part to the total.
    Occupancy on sm_90: at least 1 block per SM.
    """
    tiles_n: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    band = BAND * tl.cdiv(num_tokens, BLOCK_T)
    first_n = tl.program_id(0) // band * BAND
    size = tl.minimum(tiles_n - first_n, BAND)
    within = tl.program_id(0) % band
    n = (first_n + within % size) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = within // size * BLOCK_T + tl.arange(0, BLOCK_T)
    k, real_T, own = tl.arange(0, BLOCK_K), t < num_tokens, tl.minimum(n, ROWS - 1)
    x_KT = x_ptr + tl.minimum(t, num_tokens - 1).to(tl.int64)[None, :] * x_row + k[:, None]
    w_NK = w_ptr + own.to(tl.int64)[:, None] * PADDED + k[None, :]
    sum_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    part_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            tokens_KT = tl.load(x_KT + first)
        else:
            tokens_KT = tl.load(x_KT + first, mask=(first + k)[:, None] < DEPTH, other=0)
        part_NT = tl.dot(tl.load(w_NK + first), tokens_KT, part_NT)
        if PARTS > 1:  # noqa: SIM102  # a compile-time condition: one part needs no second accumulator
            if (first + BLOCK_K) % PART == 0:
                sum_NT += part_NT
                part_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    sum_NT += part_NT
    if bias_ptr is not None:
        sum_NT += tl.load(bias_ptr + own).to(tl.float32)[:, None]
    y_NT = y_ptr + t.to(tl.int64)[None, :] * y_row + n[:, None]
    tl.store(y_NT, sum_NT.to(y_ptr.dtype.element_ty), mask=(n[:, None] < ROWS) & real_T[None, :])


def tile_options() -> dict[str, Any]:
    """Return tile sizes and launch options of `dense_kernel`."""
    sizes = {"BLOCK_N": 128, "BLOCK_K": BLOCK, "BLOCK_T": 128, "BAND": 8}
    return sizes | {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}


def dequantize(matrix: QuantizedMatrix, constants: Mapping[str, Any], into: Tensor) -> None:
    """Write the weights of a matrix (N, K) to `into` (N, columns), with zeros after column K.

    constants: from `quantized._constants`.
    """
    rows, padded = into.shape
    block_k = 128 if constants["GROUP"] else 32  # loads of a scale for each column take registers
    dequantize_kernel[cdiv(rows, 64), cdiv(padded, block_k)](
        matrix.codes, matrix.scales, matrix.zeros, matrix.factors, matrix.index, into,
        ROWS=rows, INDEXED=matrix.scheme.indexed, PADDED=padded, BLOCK_N=64, BLOCK_K=block_k,
        num_warps=8, enable_fp_fusion=False, **constants,
    )  # fmt: skip


def linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    constants: Mapping[str, Any],
    parts: tuple[int, int],
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """Write `x W^T + b` to y (T, N) for half precision x. At most WORKSPACE weights are dequantised at once.

    constants: from `quantized._constants`. parts: from `quantized.cut`.
    """
    (tokens, columns), (rows, _), options = x.shape, matrix.shape, tile_options()
    padded = cdiv(columns, BLOCK) * BLOCK
    step = cdiv(cdiv(rows, cdiv(rows * padded, WORKSPACE)), 128) * 128
    weight = x.new_empty(min(step, rows), padded)
    for first in range(0, rows, step):
        tile = slice(first, min(first + step, rows))
        own, out = weight[: tile.stop - first], y[:, tile]
        dequantize(matrix.rows(tile), constants, own)
        dense_kernel[(cdiv(len(own), options["BLOCK_N"]) * cdiv(tokens, options["BLOCK_T"]),)](
            x, own, None if bias is None else bias[tile], out, tokens, x.stride(0), out.stride(0),
            ROWS=len(own), DEPTH=columns, PADDED=padded, PARTS=parts[0], PART=parts[1], **options,
        )  # fmt: skip
