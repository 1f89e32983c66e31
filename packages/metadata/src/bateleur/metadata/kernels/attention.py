"""Paged attention for mixed query lengths: one program per item of the work list (query tile, KV split) and key head.

A batch that may have short rows (decodes, drafts, ends of prompts) and long rows takes two launches with tiles of
different sizes. If the keys of a tile are split, programs write partial outputs, and one more launch joins them.

A tile has M lines: the query heads of one key head, for consecutive tokens. The heads of a token are adjacent, so that
a key is read once for all of them. Shapes: N keys of a loop iteration, P pages (KV blocks) of an iteration, B slots of
a page, D head dimension, S splits, L lines of a join.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)

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
    """Return offsets (N,) in the KV cache, in elements, of keys ``start`` to ``start + N - 1``; N divides ``start``.

    If N divides the page size B, one block id is loaded. If B divides N, the block ids of all pages are loaded: at once
    with ``PAGES_AT_ONCE`` (B a power of two), or one after the other with ``ONE_BY_ONE`` (up to 8 pages). In all other
    cases, a block id is loaded for each key. Block ids of pages without a key in ``first`` to ``last - 1`` are not
    read. table_ptr: block table of the request. strides: those of block and slot.
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
    """Update the softmax state (see `empty_state`) with keys ``first`` to ``last - 1``. Without ``MASKED``, both are
    multiples of N and every query sees every key.

    The tile starts ``begin_m`` lines after its request's first query, whose position is ``origin``. ``cache`` has
    pointers to keys and values of one key head and to the request's block table. ``strides`` are those of block and
    slot. ``scale`` includes log2(e). Keys outside of the range are not loaded, because a weight of zero does not remove
    NaN. Loaded values are converted to the dtype of the queries, which is exact for FP8.
    GROUP: query heads of a key head. WINDOW: sliding window in keys, 0 for none. PRECISION: ``input_precision`` of
    ``tl.dot``.
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
    """Return the softmax state (see `empty_state`) of a query tile for keys ``first`` to ``last - 1``.

    Other arguments as for `attend_keys`. Without a sliding window, keys that all queries of the tile see need no mask.
    """
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
    """Return output (M, D), 0 without keys, and log2 of the weight sums (M,). scale: softmax scale times log2(e)."""
    acc_MD, peak_M, total_M = state
    safe_M = tl.where(total_M > 0, total_M, 1.0)
    return acc_MD / safe_M[:, None], peak_M * scale + tl.log2(safe_M)


@triton.jit
def _zero_tokens(
    out_ptr, first, last, step, head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero the outputs of key head ``head`` in tiles that start at lines ``first``, ``first + step``, ... (a token has
    GROUP lines), up to the lines of token ``last - 1``.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    for begin in range(first, last * GROUP, step):
        m = begin + tl.arange(0, BLOCK_M)
        slot_M = (m // GROUP).to(tl.int64) * num_heads + head * GROUP + m % GROUP
        real_MD = (m < last * GROUP)[:, None] & (d < HEAD_DIM)
        zero_MD = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + slot_M[:, None] * HEAD_DIM + d, zero_MD, mask=real_MD)


@triton.jit(do_not_specialize=["first_item", "first_line", "num_tokens"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, work_ptr, sinks_ptr, out_ptr, part_ptr, lse_ptr, scale,
    first_item, first_line, num_tokens,
    q_token, kv_block, kv_slot, kv_head, table_row, kv_scales_ptr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute paged attention of one item, a query tile with one KV split, for one key head. Grid (items, key heads).

    Occupancy on sm_90: at least 1 block per SM. Reads queries, caches, block table, work list and scores of sinks (keys
    without a value). If a tile has one split, writes the output (T, Hq, D) to ``out_ptr``. Otherwise writes a
    normalised partial output (M, D) to ``part_ptr`` and log2 of the sum of weights (M,) to ``lse_ptr``, both in
    float32. Padding items zero the padded tokens.
    scale: softmax scale times log2(e). SCALED: ``kv_scales_ptr`` (2, key heads) scales scores and output. num_tokens:
    tokens with padding. first_item, first_line: where this launch starts in the work list, and in ``part_ptr``. q_token
    to table_row: strides. GROUP: query heads of a key head. WINDOW: sliding window in keys, 0 for none.
    """
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    num_heads = num_kv_heads * GROUP
    item_ptr = work_ptr + (first_item + tl.program_id(0)) * 8
    row, token, num_queries, seq_len = (
        tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    )  # fmt: skip
    tile, first, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5), tl.load(item_ptr + 6)
    begin_m = tile * BLOCK_M
    if row < 0:  # padding: `num_queries` is the number of padding items
        _zero_tokens(
            out_ptr, token * GROUP + begin_m, num_tokens, num_queries * BLOCK_M, head, num_heads,
            GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    line_M = begin_m + m
    real_MD = (line_M < num_queries * GROUP)[:, None] & (d < HEAD_DIM)
    q_M = (token.to(tl.int64) + line_M // GROUP) * q_token + (head * GROUP + line_M % GROUP) * HEAD_DIM
    q_MD = tl.load(q_ptr + q_M[:, None] + d, mask=real_MD, other=0)
    if SCALED:
        scale *= tl.load(kv_scales_ptr + head)
    at_head = head.to(tl.int64) * kv_head
    cache = (k_ptr + at_head, v_ptr + at_head, table_ptr + row.to(tl.int64) * table_row)
    state = attend_range(
        q_MD, seq_len - num_queries, begin_m, first, end, cache, (kv_block, kv_slot), scale,
        GROUP, BLOCK_SIZE, HEAD_DIM, WINDOW, BLOCK_N, PRECISION,
    )  # fmt: skip
    result_MD, lse_M = finish(state, scale)
    if SCALED:
        result_MD *= tl.load(kv_scales_ptr + num_kv_heads + head)
    # Loaded again, because keeping them during the loop over keys takes 40 to 80 registers per thread.
    token, num_queries, tile, part = (
        tl.load(item_ptr + 1, cache_modifier=".ca"), tl.load(item_ptr + 2, cache_modifier=".ca"),
        tl.load(item_ptr + 4, cache_modifier=".ca"), tl.load(item_ptr + 7, cache_modifier=".ca"),
    )  # fmt: skip
    line_M = tile * BLOCK_M + m
    real_MD = (line_M < num_queries * GROUP)[:, None] & (d < HEAD_DIM)
    if part < 0:
        if SINKS:
            sink_M = tl.load(sinks_ptr + head * GROUP + line_M % GROUP) * _LOG2_E
            result_MD = result_MD / (1.0 + tl.exp2(sink_M - lse_M))[:, None]
        out_M = (token.to(tl.int64) + line_M // GROUP) * num_heads + head * GROUP + line_M % GROUP
        out_MD = out_ptr + out_M[:, None] * HEAD_DIM + d
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=real_MD)
    else:
        slot_M = first_line + (part * num_kv_heads + head) * BLOCK_M + m
        tl.store(part_ptr + slot_M[:, None] * HEAD_DIM + d, result_MD, mask=real_MD)
        tl.store(lse_ptr + slot_M, lse_M)


@triton.jit(do_not_specialize=["first_join"])
def join_kernel(
    part_ptr, lse_ptr, work_ptr, sinks_ptr, out_ptr, first_join,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute the output of a tile's lines from the partial outputs of its splits, always in the order of the splits.

    Grid (joins: tiles with several splits; groups of L lines; key heads). Occupancy on sm_90: at least 3 blocks per SM.
    Reads partial outputs, log2 of their sums of weights (``lse_ptr``), the work list and, with SINKS, scores of keys
    without a value. Writes ``out_ptr`` (T, Hq, D). first_join: index of the first join in the list.
    """
    head, num_kv_heads = tl.program_id(2), tl.num_programs(2)
    join_ptr = work_ptr + (first_join + tl.program_id(0)) * 8
    token, begin_m, num_m = tl.load(join_ptr), tl.load(join_ptr + 1), tl.load(join_ptr + 2)
    splits, first_line, stride = tl.load(join_ptr + 3), tl.load(join_ptr + 4), tl.load(join_ptr + 5)
    if tl.program_id(1) * BLOCK_L >= num_m:
        return
    begin, d = tl.program_id(1) * BLOCK_L, tl.arange(0, BLOCK_D)
    x = tl.arange(0, BLOCK_S * BLOCK_L)
    s_X, m_X = x // BLOCK_L, begin + x % BLOCK_L
    acc_LD = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    peak_L = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total_L = tl.zeros([BLOCK_L], tl.float32)
    line_L = begin_m + begin + tl.arange(0, BLOCK_L)
    if SINKS:
        peak_L = tl.load(sinks_ptr + head * GROUP + line_L % GROUP) * _LOG2_E
        total_L += 1.0
    for start in range(0, splits, BLOCK_S):
        slot_X = first_line + ((start + s_X) * num_kv_heads + head) * stride + m_X
        real_X = (start + s_X < splits) & (m_X < num_m)
        lse_SL = tl.reshape(tl.load(lse_ptr + slot_X, mask=real_X, other=float("-inf")), [BLOCK_S, BLOCK_L])
        part_XD = tl.load(
            part_ptr + slot_X[:, None] * HEAD_DIM + d[None, :], mask=real_X[:, None] & (d < HEAD_DIM)[None, :], other=0
        )
        highest_L = tl.maximum(peak_L, tl.max(lse_SL, 0))
        base_L = tl.where(highest_L == float("-inf"), 0.0, highest_L)
        weight_SL = tl.exp2(lse_SL - base_L[None, :])
        fade_L = tl.exp2(peak_L - base_L)
        part_XD *= tl.reshape(weight_SL, [BLOCK_S * BLOCK_L])[:, None]
        acc_LD = acc_LD * fade_L[:, None] + tl.sum(tl.reshape(part_XD, [BLOCK_S, BLOCK_L, BLOCK_D]), 0)
        total_L = total_L * fade_L + tl.sum(weight_SL, 0)
        peak_L = highest_L
    acc_LD = acc_LD / tl.where(total_L > 0, total_L, 1.0)[:, None]
    m = begin + tl.arange(0, BLOCK_L)
    out_L = (token.to(tl.int64) + line_L // GROUP) * num_kv_heads * GROUP + head * GROUP + line_L % GROUP
    out_LD = out_ptr + out_L[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_LD, acc_LD.to(out_ptr.dtype.element_ty), mask=(m < num_m)[:, None] & (d < HEAD_DIM)[None, :])
