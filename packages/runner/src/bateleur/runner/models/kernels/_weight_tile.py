"""Dequantised tiles of quantised matrices, in registers. Legend: N rows, K columns, G groups with one scale each."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def e4m3(bits):
    """Convert bits of e4m3 to float32, by an instruction on GPUs from sm_89 on, else by moving bits."""
    if cuda_capability_geq(8, 9):
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def int4(codes, MIDDLE: tl.constexpr):
    """Return low and high nibbles minus MIDDLE, via the last bits of 2^23 and 2^19: integer conversions are slow."""
    bits = codes.to(tl.int32)
    low, high = (bits & 0x0F) | 0x4B000000, (bits & 0xF0) | 0x49000000
    return low.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE), high.to(tl.float32, bitcast=True) - (
        524288.0 + MIDDLE
    )


@triton.jit
def e2m1(codes):
    """Return 2^-14 times the numbers in the low and the high nibbles of codes, in float32."""
    bits = codes.to(tl.int32)
    bits |= bits << 12
    halves = ((bits << 12) & -0x7FFF8000) | ((bits << 9) & 0x0E000E00)
    low, high = halves.to(tl.int16), (halves >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def of_columns(row_N, k, first, group_K,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load scales or zeros for a tile of columns `k`, from `first` on, from rows of a table (N, groups of columns).

    The result is (N, columns), (N, groups) or (N, 1); `by_column` broadcasts it to (N, K).
    GROUP: columns of a group; 0 reads the group of each column from group_K.
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
    """Broadcast the result of `of_columns` to (N, K)."""
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

    Columns after the matrix's last have arbitrary finite values. Column k has group (k + START) // WIDTH, or index[k]
    if INDEXED.
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
