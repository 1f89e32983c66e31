"""Online softmax of one tile of queries over a range of its request's keys.

A tile has M lines: the query heads of one key head, for consecutive tokens. The heads of a token are adjacent, so that
a key is read once for all of them. Shapes: M tile lines, N keys of a loop iteration, P pages (KV blocks) of an
iteration, B slots of a page, D head dimension.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# Triton before 3.8 does not pipeline loads with reshaped offsets. Block ids are then loaded one by one.
_PAGES_AT_ONCE = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8))
_MOST_PAGES = tl.constexpr(8)  # of an iteration, if block ids are loaded one by one


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the softmax state before any key, in float32: output (M, D), maximum (M,) and sum of weights (M,)."""
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), peak_M, tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def _offsets(
    table_ptr, start, first, last, strides,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PAGES_AT_ONCE: tl.constexpr, ONE_BY_ONE: tl.constexpr,
):  # fmt: skip
    """Return memory offsets (N,) in the KV cache of the keys from ``start`` on, a multiple of N.

    If pages and iterations are aligned, the block id is loaded once for each page: for all pages in one load, or one
    by one with ``ONE_BY_ONE``. Otherwise it is loaded for each key. Block ids of pages without a key in ``first`` to
    ``last - 1`` are not read.
    """
    n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offset_N = block * strides[0] + (start % BLOCK_SIZE + n) * strides[1]
    elif PAGES_AT_ONCE and BLOCK_N % BLOCK_SIZE == 0 and BLOCK_SIZE & (BLOCK_SIZE - 1) == 0:
        page_P = start // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
        used_P = (page_P * BLOCK_SIZE < last) & ((page_P + 1) * BLOCK_SIZE > first)
        block_P = tl.load(table_ptr + page_P, mask=used_P, other=0).to(tl.int64)
        offset_PB = block_P[:, None] * strides[0] + tl.arange(0, BLOCK_SIZE)[None, :] * strides[1]
        offset_N = tl.reshape(offset_PB, [BLOCK_N])
    elif ONE_BY_ONE and BLOCK_N % BLOCK_SIZE == 0 and BLOCK_N // BLOCK_SIZE <= _MOST_PAGES:
        offset_N = (n % BLOCK_SIZE).to(tl.int64) * strides[1]
        for p in tl.static_range(BLOCK_N // BLOCK_SIZE):
            page = start // BLOCK_SIZE + p
            used = (page * BLOCK_SIZE < last) & ((page + 1) * BLOCK_SIZE > first)
            block = tl.load(table_ptr + page, mask=used, other=0).to(tl.int64)
            offset_N += tl.where(n // BLOCK_SIZE == p, block * strides[0], 0)
    else:
        key_N = start + n
        used_N = (key_N < last) & (key_N >= first)
        block_N = tl.load(table_ptr + key_N // BLOCK_SIZE, mask=used_N, other=0).to(tl.int64)
        offset_N = block_N * strides[0] + (key_N % BLOCK_SIZE) * strides[1]
    return offset_N


@triton.jit
def attend_keys(
    q_MD, state, origin, begin_m, first, last, cache, strides, scale,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update ``state`` with the keys ``first`` to ``last - 1``. Without ``MASKED``, both are multiples of N and every
    query sees every key.

    The tile starts ``begin_m`` lines after its request's first query, whose position is ``origin``. ``cache`` has
    pointers to keys and values of one key head and to the request's block table. ``strides`` are those of block and
    slot. ``scale`` includes log2(e). Keys outside of the range are not loaded, because a weight of zero does not remove
    NaN. Loaded values are converted to the dtype of the queries, which is exact for FP8.
    """
    k_ptr, v_ptr, table_ptr = cache
    acc_MD, peak_M, total_M = state
    d = tl.arange(0, q_MD.shape[1])[None, :]
    # 128 lines of 256 lanes leave no registers to load all block ids at once.
    AT_ONCE: tl.constexpr = _PAGES_AT_ONCE and q_MD.shape[0] * q_MD.shape[1] <= 128 * 128
    for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        stored_N = ((key_N < last) & (key_N >= first)) | (not MASKED)
        offset_N = _offsets(table_ptr, start, first, last, strides, BLOCK_SIZE, BLOCK_N, AT_ONCE, not _PAGES_AT_ONCE)
        stored_ND = stored_N[:, None] & (d < HEAD_DIM)
        k_ND = tl.load(k_ptr + offset_N[:, None] + d, mask=stored_ND, other=0.0).to(q_MD.dtype)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if MASKED:
            position_M = origin + (begin_m + tl.arange(0, q_MD.shape[0])) // GROUP
            seen_MN = stored_N[None, :] & (key_N[None, :] <= position_M[:, None])
            if WINDOW > 0:
                seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        highest_M = tl.maximum(peak_M, tl.max(score_MN, 1))
        # A query without a key so far gets weights of 0 instead of NaN.
        base_M = tl.where(highest_M == float("-inf"), 0.0, highest_M) * scale
        weight_MN = tl.exp2(score_MN * scale - base_M[:, None])
        fade_M = tl.exp2(peak_M * scale - base_M)
        v_ND = tl.load(v_ptr + offset_N[:, None] + d, mask=stored_ND, other=0.0).to(q_MD.dtype)
        acc_MD = acc_MD * fade_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        total_M = total_M * fade_M + tl.sum(weight_MN, 1)
        peak_M = highest_M
    return acc_MD, peak_M, total_M


@triton.jit
def attend_range(
    q_MD, origin, begin_m, first, last, cache, strides, scale,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the softmax state after the keys ``first`` to ``last - 1``. Keys visible to all queries need no mask."""
    state = empty_state(q_MD.shape[0], q_MD.shape[1])
    if WINDOW == 0:
        whole = tl.maximum(tl.minimum(last, origin + begin_m // GROUP + 1) // BLOCK_N * BLOCK_N, first)
        state = attend_keys(
            q_MD, state, origin, begin_m, first, whole, cache, strides,
            scale, GROUP, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, False, PRECISION,
        )  # fmt: skip
        first = whole
    return attend_keys(
        q_MD, state, origin, begin_m, first, last, cache, strides,
        scale, GROUP, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, True, PRECISION,
    )  # fmt: skip


@triton.jit
def finish(state, scale):
    """Return the attention output (M, D), 0 without keys, and the base-2 logarithm of the sum of weights (M,)."""
    acc_MD, peak_M, total_M = state
    safe_M = tl.where(total_M > 0, total_M, 1.0)
    return acc_MD / safe_M[:, None], peak_M * scale + tl.log2(safe_M)
