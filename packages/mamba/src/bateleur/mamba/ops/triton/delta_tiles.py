"""The gated delta rule over prefills in bfloat16, in tiles of 64 tokens: two kernels after `delta_scan.pairs_kernel`.

With one decay per head, one operand of each product with the state is raw keys or queries, which are exact in bfloat16.
The float32 operand is split into three bfloat16 numbers with 24 bits together. All products therefore run on tensor
cores at the bfloat16 rate, and operands are copied to shared memory without registers.

1. join: joins the inverses of 16 tokens to the inverse T of a tile, by block forward substitution.
2. walk: the tiles of a request in order, with the state S in registers: x = v - S k, u = T x, o = S q + P T x. P are
   the weights of queries for keys. u is added to the state. Decays are factors of k, q, T and P.

With one decay per key channel no operand is exact, and registers would spill. Kimi delta attention therefore uses tiles
of 16 tokens, like float32 and float16.

Legend: T tokens of a tile, V value channels of a head's tile, K key channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bateleur.mamba.ops.triton.delta_rule import zero_tokens
from bateleur.mamba.ops.triton.tiles import INDICES, LAUNCH, load_tile, state_tile, store_tile, unless_null
from bateleur.metadata.dispatch import cdiv, next_power_of_2

TILE = 64
"""Tokens of a tile: the minimum for which all four tensor cores of a multiprocessor share one product."""
_BLOCK = 16  # tokens of `pairs_kernel`
_MOST_KEY_CHANNELS = 128  # two tiles of keys and queries fit into shared memory
_INVERSE_PARTS, _QUERY_PARTS = 3, 2  # parts of bfloat16 that are kept: 24 and 16 bits


def token_distances(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the strides of tokens in q, k and v, which are compile-time constants of `walk_tiles_kernel`.

    A view of one token may have any stride. It gets the stride that a layer's convolution output has, so that no
    additional kernel is compiled.
    """
    if v.shape[0] > 1:
        return {"Q_TOKEN": q.stride(0), "K_TOKEN": k.stride(0), "V_TOKEN": v.stride(0)}
    return dict.fromkeys(("Q_TOKEN", "K_TOKEN", "V_TOKEN"), 2 * q.shape[1] * q.shape[2] + v.shape[1] * v.shape[2])


def takes_tiles(q: Tensor, k: Tensor, distances: dict[str, int], decays: int, chunk_size: int) -> bool:
    """Return whether tiles of 64 tokens can be used: bfloat16, one decay per head, at most 128 key channels, chunks of
    more than 16 tokens, and keys and queries that begin at multiples of 16 elements. distances: see `token_distances`.

    Triton does not prefetch unaligned keys and queries to shared memory, and then stores other matrices at the same
    addresses there, in another layout. ptxas 12.8 (Triton 3.6) miscompiles products if matrices of two layouts share an
    address.
    """
    begins = distances["Q_TOKEN"] | distances["K_TOKEN"] | q.stride(1) | k.stride(1)
    is_aligned = bool((begins | q.storage_offset() | k.storage_offset()) % 16 == 0)
    exact = q.dtype == torch.bfloat16 and decays == 1 and q.shape[2] <= _MOST_KEY_CHANNELS
    return exact and chunk_size > _BLOCK and is_aligned


@triton.jit
def _upper(x):
    """Return a float32 with the upper 16 bits of x, which is exact in bfloat16; x minus it is exact, too."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x):
    """Split a float32 into three bfloat16 numbers, whose sum is the float32."""
    high = _upper(x)
    rest = x - high
    middle = _upper(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def _product(x, high, middle, low, accumulator):
    """Add a bfloat16 matrix x times a float32 matrix, split into three bfloat16 parts, to the accumulator."""
    accumulator = tl.dot(x, low, accumulator)
    accumulator = tl.dot(x, middle, accumulator)
    return tl.dot(x, high, accumulator)


@triton.jit
def _product_of_parts(a, b, c, high, middle, low):
    """Multiply two float32 matrices, split into three bfloat16 parts each, without terms below the 24th bit."""
    accumulator = tl.dot(a, low)
    accumulator = tl.dot(b, middle, accumulator)
    accumulator = tl.dot(c, high, accumulator)
    accumulator = tl.dot(a, middle, accumulator)
    accumulator = tl.dot(b, high, accumulator)
    return tl.dot(a, high, accumulator)


@triton.jit
def _coarse_product(a, b, high, middle, accumulator):
    """Add the product of two float32 matrices, split into two bfloat16 parts each, to the accumulator.

    The two parts have 16 bits together; outputs are rounded to 8 bits.
    """
    accumulator = tl.dot(a, middle, accumulator)
    accumulator = tl.dot(b, high, accumulator)
    return tl.dot(a, high, accumulator)


@triton.jit
def _store_parts(ptr_TT, x_TT, mask_TT, PARTS: tl.constexpr, TILE: tl.constexpr):
    for part in tl.static_range(PARTS):
        high_TT = _upper(x_TT)
        tl.store(ptr_TT + part * TILE, high_TT.to(tl.bfloat16), mask=mask_TT)
        x_TT -= high_TT


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def join_kernel(
    q_ptr, k_ptr, chunk_starts_ptr, sum_ptr, rest_ptr, block_inverse_ptr, block_query_ptr, scale_ptr,
    inverse_ptr, query_ptr, num_tokens, q_token, q_group, k_token, k_group,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    INVERSE_PARTS: tl.constexpr, QUERY_PARTS: tl.constexpr,
):  # fmt: skip
    """Join the inverses of tiles of 16 tokens to the inverse T of a tile of 64, and the weights P of queries for keys.

    Grid (chunks x tiles of tokens, heads). Reads q, k, chunk_starts and the results of `pairs_kernel`; its inverse and
    query are ``block_inverse_ptr`` and ``block_query_ptr``. Writes the rows of T to ``inverse_ptr`` and those of P T to
    ``query_ptr``, split into bfloat16 parts. ``scale_ptr`` has four entries per token. The kernel reads the first two,
    the factors that normalize its key and query, and overwrites all four:

    * 0, 1: key factor and query factor, each times the decay from the start of the tile to the token;
    * 2: key factor times the decay from the token to the end of the tile;
    * 3: decay of the whole tile.

    Occupancy on sm_90: at least 2 blocks per SM.
    """
    chunk, head = tl.program_id(0) // TILES, tl.program_id(1)
    first = tl.load(chunk_starts_ptr + chunk) + tl.program_id(0) % TILES * TILE
    count = tl.minimum(tl.load(chunk_starts_ptr + chunk + 1) - first, TILE)
    if count <= 0:
        return
    line, token = head.to(tl.int64) * num_tokens + first, first.to(tl.int64)
    t, k = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    real_T, real_K, block_T = t < count, k < KEY_DIM, t // 16
    k_K = k_ptr + token * k_token + head // GROUP * k_group + k
    q_K = q_ptr + token * q_token + head // GROUP * q_group + k
    k_TK = load_tile(k_K, t * k_token, real_T, real_K)
    scale_T = scale_ptr + (line + t) * 4
    k_T, q_T = tl.load(scale_T, mask=real_T, other=0), tl.load(scale_T + 1, mask=real_T, other=0)
    # Exponents are sums over the tokens between two tokens, not differences of sums, as in `pairs_kernel`.
    sum_ptr += line
    sum_T = tl.load(sum_ptr + t, mask=real_T, other=0)
    rest_T = tl.load(rest_ptr + line + t, mask=real_T, other=0)
    total_0 = tl.load(sum_ptr + tl.minimum(15, count - 1))
    total_1 = tl.load(sum_ptr + tl.minimum(31, count - 1), mask=count > 16, other=0)
    total_2 = tl.load(sum_ptr + tl.minimum(47, count - 1), mask=count > 32, other=0)
    total_3 = tl.load(sum_ptr + tl.minimum(63, count - 1), mask=count > 48, other=0)
    before_T = sum_T + tl.where(block_T > 0, total_0, 0.0) + tl.where(block_T > 1, total_1, 0.0)
    before_T += tl.where(block_T > 2, total_2, 0.0)
    after_T = rest_T + tl.where(block_T < 1, total_1, 0.0) + tl.where(block_T < 2, total_2, 0.0)
    after_T += tl.where(block_T < 3, total_3, 0.0)
    row, column = block_T[:, None], block_T[None, :]
    log_TT = sum_T[:, None] + rest_T[None, :] + tl.where((row > 1) & (column < 1), total_1, 0.0)
    log_TT += tl.where((row > 2) & (column < 2), total_2, 0.0)
    left_TT = tl.where(row > column, tl.exp(tl.minimum(log_TT, 0.0)) * k_T[None, :], 0.0)
    key_TT = tl.dot(k_TK, tl.trans(k_TK)) * left_TT * k_T[:, None]
    own, line_TT = (row == column) & real_T[:, None], line * 16 + t[:, None] * 16 + t[None, :] % 16
    inverse_TT = tl.load(block_inverse_ptr + line_TT, mask=own, other=0)
    # Joins two blocks of 16 tokens, then two of 32.
    for level in range(2):
        near = row // 2 == column // 2
        part_TT = tl.where(near == (level == 0), key_TT, 0.0)
        a, b, c = _parts(inverse_TT)
        high, middle, low = _parts(part_TT)
        high, middle, low = _parts(_product_of_parts(high, middle, low, a, b, c))
        inverse_TT -= _product_of_parts(a, b, c, high, middle, low)
    below = (row >= column) & real_T[:, None]
    inverse_TT_ptr = inverse_ptr + line * (INVERSE_PARTS * TILE) + t[:, None] * (INVERSE_PARTS * TILE) + t[None, :]
    _store_parts(inverse_TT_ptr, inverse_TT, below, INVERSE_PARTS, TILE)
    tl.debug_barrier()  # loads queries after the keys, so that fewer values are in registers
    q_TK = load_tile(q_K, t * q_token, real_T, real_K)
    query_TT = tl.load(block_query_ptr + line_TT, mask=own, other=0)
    query_TT += tl.dot(q_TK, tl.trans(k_TK)) * left_TT * q_T[:, None]
    a, b, c = _parts(query_TT)
    high, middle, low = _parts(inverse_TT)
    query_TT = _coarse_product(a, b, high, middle, tl.zeros([TILE, TILE], tl.float32))
    query_TT_ptr = query_ptr + line * (QUERY_PARTS * TILE) + t[:, None] * (QUERY_PARTS * TILE) + t[None, :]
    _store_parts(query_TT_ptr, query_TT, below, QUERY_PARTS, TILE)
    tl.store(scale_T, k_T * tl.exp(before_T), mask=real_T)
    tl.store(scale_T + 1, q_T * tl.exp(before_T), mask=real_T)
    tl.store(scale_T + 2, k_T * tl.exp(after_T), mask=real_T)
    tl.store(scale_T + 3, tl.exp(before_T + after_T), mask=real_T)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=INDICES)
def walk_tiles_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, scale_ptr, inverse_ptr, query_ptr,
    starts_ptr, chunk_starts_ptr, row_chunk_ptr, read_ptr, chunk_write_ptr, o_ptr,
    num_rows, num_tokens, state_slot, q_group, k_group, v_head,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    INVERSE_PARTS: tl.constexpr, QUERY_PARTS: tl.constexpr,
):  # fmt: skip
    """Run the tiles of each request in order: compute outputs, and write the state after each chunk to its slot.

    Grid (heads x tiles of values, requests + 1): the last programs zero the outputs of tokens after the last request.
    Occupancy on sm_90: at least 1 block per SM. Reads ``scale_ptr`` to ``query_ptr``, which `join_kernel` wrote, and
    arguments of `ops.delta_scan_varlen` (starts: `query_start_loc`; row_chunk: first chunk of each row; read,
    chunk_write: state slots). Writes ``o_ptr`` and ``state_ptr``. The strides of tokens are constants, so that the
    addresses of a tile need one register.
    """
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // TILES, tl.program_id(1)
    v = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    t, k = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    real_V, real_K, lane_V = v < VALUE_DIM, k < KEY_DIM, head * VALUE_DIM + v
    if row == num_rows:
        zero_tokens(o_ptr + lane_V, tl.load(starts_ptr + row), num_tokens, HEADS * VALUE_DIM, t, real_V)
        return
    slot = tl.load(read_ptr + row).to(tl.int64)
    read_K = k < unless_null(slot, KEY_DIM)
    state_VK = load_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, real_V, read_K)
    state_KV = tl.trans(state_VK.to(tl.float32))
    tl.debug_barrier()  # a chunk may write the slot that its row reads
    line = head.to(tl.int64) * num_tokens
    inverse_ptr += line * (INVERSE_PARTS * TILE)
    query_ptr += line * (QUERY_PARTS * TILE)
    k_ptr += head // GROUP * k_group
    q_ptr += head // GROUP * q_group
    v_ptr += head * v_head
    o_ptr += head * VALUE_DIM
    scale_ptr += line * 4
    inverse_TT = (t * (INVERSE_PARTS * TILE))[:, None] + t[None, :]
    query_TT = (t * (QUERY_PARTS * TILE))[:, None] + t[None, :]
    below_TT = (t // 16)[None, :] <= (t // 16)[:, None]  # blocks of later tokens are zeros
    zero_TV = tl.zeros([TILE, BLOCK_V], tl.float32)
    for chunk in range(tl.load(row_chunk_ptr + row), tl.load(row_chunk_ptr + row + 1)):
        begin, end = tl.load(chunk_starts_ptr + chunk), tl.load(chunk_starts_ptr + chunk + 1)
        for first in range(begin, end, TILE):
            token, real_T = begin.to(tl.int64) + (first - begin), t < end - first
            k_TK = load_tile(k_ptr + token * K_TOKEN + k, t * K_TOKEN, real_T, real_K)
            q_TK = load_tile(q_ptr + token * Q_TOKEN + k, t * Q_TOKEN, real_T, real_K)
            v_TV = load_tile(v_ptr + token * V_TOKEN + v, t * V_TOKEN, real_T, real_V)
            real_TT = real_T[:, None] & below_TT
            own_TT = inverse_ptr + token * (INVERSE_PARTS * TILE) + inverse_TT
            inverse_a = tl.load(own_TT, mask=real_TT, other=0)
            inverse_b = tl.load(own_TT + TILE, mask=real_TT, other=0)
            inverse_c = tl.load(own_TT + 2 * TILE, mask=real_TT, other=0)
            own_TT = query_ptr + token * (QUERY_PARTS * TILE) + query_TT
            query_a = tl.load(own_TT, mask=real_TT, other=0)
            query_b = tl.load(own_TT + TILE, mask=real_TT, other=0)
            scale = scale_ptr + token * 4
            key_T = tl.load(scale + t * 4, mask=real_T, other=0)
            query_T = tl.load(scale + t * 4 + 1, mask=real_T, other=0)
            last_T = tl.load(scale + t * 4 + 2, mask=real_T, other=0)
            high, middle, low = _parts(state_KV)
            x_TV = v_TV.to(tl.float32) - _product(k_TK, high, middle, low, zero_TV) * key_T[:, None]
            o_TV = tl.dot(q_TK, high, tl.dot(q_TK, middle)) * query_T[:, None]
            high, middle, low = _parts(x_TV)
            u_TV = _product_of_parts(inverse_a, inverse_b, inverse_c, high, middle, low)
            o_TV = _coarse_product(query_a, query_b, high, middle, o_TV)
            store_tile(o_ptr + token * (HEADS * VALUE_DIM) + v, t * (HEADS * VALUE_DIM), o_TV, real_T, real_V)
            high, middle, low = _parts(u_TV * last_T[:, None])
            state_KV = _product(tl.trans(k_TK), high, middle, low, state_KV * tl.load(scale + 3))
        slot = tl.load(chunk_write_ptr + chunk).to(tl.int64)
        write_K = k < unless_null(slot, tl.where(end > begin, KEY_DIM, 0))
        store_tile(state_ptr + slot * state_slot + k, lane_V * KEY_DIM, tl.trans(state_KV), real_V, write_K)


def scan_tiles(
    state, q, k, v, total, rest, inverse, query, scale, shape, distances,
    query_start_loc, chunk_start_loc, row_chunk_loc, chunk_size, read, chunk_write, o,
):  # fmt: skip
    """Launch `join_kernel` and `walk_tiles_kernel`, which write the outputs ``o`` and the states.

    ``total`` to ``scale``: results of `pairs_kernel`. ``shape``: from `shape_options`. ``distances``: from
    `token_distances`. read, chunk_write: state slots. The others: as in `ops.delta_scan_varlen`.
    """
    heads, value_dim, key_dim = (shape[name] for name in ("HEADS", "VALUE_DIM", "KEY_DIM"))
    options = LAUNCH | {"TILE": TILE, "BLOCK_K": max(16, next_power_of_2(key_dim))}
    options |= {"INVERSE_PARTS": _INVERSE_PARTS, "QUERY_PARTS": _QUERY_PARTS}
    block_v = state_tile(value_dim, 32)
    num_tokens, num_chunks = v.shape[0], chunk_write.shape[0]
    of_tile = torch.empty(
        (heads, num_tokens, _INVERSE_PARTS + _QUERY_PARTS, TILE), dtype=torch.bfloat16, device=v.device
    )
    parts = of_tile.view(-1).split([heads * num_tokens * TILE * each for each in (_INVERSE_PARTS, _QUERY_PARTS)])
    tiles = cdiv(chunk_size, TILE)
    join_kernel[(num_chunks * tiles, heads)](
        q, k, chunk_start_loc, total, rest, inverse, query, scale, *parts,
        num_tokens, *q.stride()[:2], *k.stride()[:2],
        GROUP=shape["GROUP"], KEY_DIM=key_dim, TILES=tiles, **options,
    )  # fmt: skip
    sizes = {name: shape[name] for name in ("HEADS", "GROUP", "VALUE_DIM", "KEY_DIM")}
    walk_tiles_kernel[(heads * cdiv(value_dim, block_v), read.shape[0] + 1)](
        state, q, k, v, scale, *parts,
        query_start_loc, chunk_start_loc, row_chunk_loc, read, chunk_write, o,
        read.shape[0], num_tokens, state.stride(0), q.stride(1), k.stride(1), v.stride(1),
        **distances, **sizes, BLOCK_V=block_v, num_stages=2, **options,
    )  # fmt: skip
