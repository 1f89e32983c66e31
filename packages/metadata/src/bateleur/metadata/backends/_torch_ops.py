"""Vectorised torch implementations of the paged-attention operators, without a loop over requests or a host sync.

Shapes: T tokens, R rows (requests), S keys and M queries of a row (padded to a host bound), H heads, D head dimension.
"""

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.metadata._memory import movable
from bateleur.metadata.backends._launch_config import ENTRY_SIZE, work_shape

_Caches: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Caches of keys and values, and their scales (2, Hkv) or None."""
_Rows: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Block table (R, max_blocks), lengths (R,) and starts (R + 1,) of some rows."""

FP8_MAX = 448.0  # largest value of float8_e4m3fn
_MAX_TILE_SCORES = 1 << 20  # scores of a tile: bounds the mask at 4 MiB in float32
_MAX_TILE_KEYS = 1 << 20  # gathered entries of a tile of several rows: keys and values take 4 MiB each in float32


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Store keys and values by slot, see ``ops.write_kv``. For slot -1, zeros go to slot 0 of the null block."""
    check_slots(k, v, slot_mapping)
    skipped = (slot_mapping < 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    for i, (new, cache) in enumerate(((k, k_cache), (v, v_cache))):
        flat = cache.view(-1, *cache.shape[2:])
        scale = None if kv_scales is None else kv_scales[i]
        stored = quantize(new.masked_fill(skipped, 0), cache.dtype, scale)
        movable(flat).index_copy_(0, slots, movable(stored))


def quantize(x_THD: Tensor, dtype: torch.dtype, scale_H: Tensor | None) -> Tensor:
    """Return ``x / scale`` in ``dtype``, the dtype of a KV cache. float8_e4m3fn saturates at 448; NaN stays NaN."""
    if scale_H is not None:
        x_THD = x_THD.float() / scale_H[:, None]
    if dtype == torch.float8_e4m3fn:
        x_THD = x_THD.float().clamp(-FP8_MAX, FP8_MAX)
    return x_THD.to(dtype)


def rotate_and_write_kv(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 0.0, kv_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply optional RMS norms and rotary embedding to ``q`` (in place) and ``k``, then store ``k`` and ``v``.

    Same arguments as ``ops.rotate_and_write_kv``.
    """
    if q_norm is not None and k_norm is not None:
        whole = norm_spans_all_heads(q, k, q_norm, k_norm)
        q.copy_(rms_norm(q, q_norm, eps, whole))
        k = rms_norm(k, k_norm, eps, whole)
    if cos is not None and sin is not None:
        q[..., : cos.shape[-1]] = apply_rotary(q, cos, sin)
        k = torch.cat((apply_rotary(k, cos, sin), k[..., cos.shape[-1] :]), -1)
    write_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def norm_spans_all_heads(q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor) -> bool:
    """Return whether norm weights cover all heads of a token, or one head. Raises ValueError if they fit neither."""
    sizes, head_dim = (q_norm.numel(), k_norm.numel()), q.shape[2]
    if sizes == (head_dim, head_dim):
        return False
    if sizes != (q.shape[1] * head_dim, k.shape[1] * head_dim):
        raise ValueError(
            f"q_norm, k_norm: have {sizes[0]} and {sizes[1]} weights, must have those of a head, {head_dim}, or of "
            f"all {q.shape[1]} and {k.shape[1]}"
        )
    return True


def rms_norm(x_THD: Tensor, weight: Tensor, eps: float, whole: bool) -> Tensor:
    """RMS norm over each head, or over a token's heads together if ``whole``. Computed in float32, rounded once."""
    x = x_THD.flatten(1) if whole else x_THD
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return y.to(x_THD.dtype).view(x_THD.shape)


def apply_rotary(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the leading R dimensions of every head: dimension i is paired with i + R/2. The first R/2 sines are
    negated: the result is ``x * cos + roll(x, R/2) * sin``.
    """
    rotary_dim = cos_T1R.shape[-1]
    part_THR = x_THD[..., :rotary_dim]
    return torch.addcmul(part_THR * cos_T1R, part_THR.roll(rotary_dim // 2, -1), sin_T1R)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    num_decodes: int, max_query_len: int, max_seq_len: int, scale: float, sliding_window: int,
    work: Tensor | None = None, sinks: Tensor | None = None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention over the paged caches, in tiles. Same arguments and result as ``ops.paged_attention``."""
    check_sizes(q, k_cache, block_table, seq_lens, num_decodes, max_seq_len, sinks)
    out_THD = q.new_zeros(q.shape[0] + 1, *q.shape[1:])  # the last row receives results of padded queries
    if not max_seq_len:
        return out_THD[:-1]
    caches, scores = (k_cache, v_cache, kv_scales), (max_seq_len, scale, sliding_window, sinks)
    num_rows, num_keys = seq_lens.shape[0], max_seq_len * k_cache.shape[2] * k_cache.shape[3]
    tile_queries = max(1, min(max_query_len, _MAX_TILE_SCORES // max_seq_len))
    tile_rows = max(1, min(_MAX_TILE_SCORES // (max_seq_len * tile_queries), _MAX_TILE_KEYS // num_keys))
    for first in range(0, num_rows, tile_rows):
        last = min(first + tile_rows, num_rows)
        rows = block_table[first:last], seq_lens[first:last], query_start_loc[first : last + 1]
        for offset in range(0, max_query_len, tile_queries):
            _attend_tile(out_THD, q, caches, rows, (offset, min(offset + tile_queries, max_query_len)), *scores)
    return out_THD[:-1]


def attention_work(
    k_cache: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_heads: int, num_tokens: int, max_query_len: int,
    sliding_window: int, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return zeros of the size of a work list, which only Triton reads. Arguments: ``ops.attention_work``."""
    num_rows = seq_lens.shape[0]
    shape = work_shape(num_heads, k_cache, num_rows, num_tokens, max_query_len, sliding_window, dtype)
    return seq_lens.new_zeros(shape.num_entries, ENTRY_SIZE, dtype=torch.int32)


def check_slots(k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    if slot_mapping.shape[0] != k.shape[0] or k.shape != v.shape:
        raise ValueError(
            f"slot_mapping: has {slot_mapping.shape[0]} slots for keys {tuple(k.shape)} and values {tuple(v.shape)}"
        )


def check_sizes(
    q: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    num_decodes: int, max_seq_len: int, sinks: Tensor | None,
) -> None:  # fmt: skip
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32):
        raise ValueError(
            f"sinks: has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; must be ({q.shape[1]},) of float32"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q: {q.shape[1]} heads are no multiple of the cache's {k_cache.shape[2]}")
    num_rows, num_tokens = seq_lens.shape[0], q.shape[0]
    if not 0 <= num_decodes <= min(num_rows, num_tokens):
        raise ValueError(f"num_decodes: {num_decodes} must be within {num_rows} rows and {num_tokens} tokens")
    capacity = block_table.shape[1] * k_cache.shape[1]
    if max_seq_len > capacity:
        raise ValueError(f"max_seq_len: {max_seq_len} is above the {capacity} tokens a block table holds")


def _sink_attention(
    q_RHMD: Tensor, k_RHSD: Tensor, v_RHSD: Tensor, hidden_RMS: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """Return attention (R, H, M, D), at least float32, with one more key of score ``sinks[h]`` and without a value.

    hidden_RMS: True for keys that a query does not see.
    """
    exact = torch.promote_types(q_RHMD.dtype, torch.float32)
    group = q_RHMD.shape[1] // k_RHSD.shape[1]
    k, v = (x.to(exact).repeat_interleave(group, 1) for x in (k_RHSD, v_RHSD))
    scores = (q_RHMD.to(exact) @ k.transpose(2, 3)).mul_(scale)
    scores.masked_fill_(hidden_RMS[:, None], -torch.inf)
    sink = sinks.to(exact).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights @ v).to(q_RHMD.dtype)


def _attend_tile(
    out_THD: Tensor, q_THD: Tensor, caches: _Caches, rows: _Rows, queries: tuple[int, int],
    max_seq_len: int, scale: float, sliding_window: int, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Compute attention of queries ``queries[0]:queries[1]`` of each row, and write the result to ``out_THD``."""
    block_table, seq_lens, starts = rows
    device, num_tokens = q_THD.device, q_THD.shape[0]
    m_M = torch.arange(*queries, device=device, dtype=torch.int32)
    lens_R = starts[1:] - starts[:-1]
    token_RM = starts[:-1, None] + m_M
    real_RM = m_M < lens_R[:, None]
    first_R = seq_lens - lens_R  # position of each row's first query in this step
    i_RM = first_R[:, None] + m_M
    j_S = torch.arange(max_seq_len, device=device, dtype=torch.int32)
    unused_RS = j_S >= seq_lens[:, None]
    hidden_RMS = j_S > i_RM[:, :, None]
    if sliding_window:  # blocks of keys older than every window may be freed
        unused_RS |= j_S <= first_R[:, None] - sliding_window
        hidden_RMS |= j_S <= i_RM[:, :, None] - sliding_window
    slots_RS = _leading_slots(block_table, max_seq_len, caches[0].shape[1])
    # SDPA supports grouped heads with a mask on a CPU only.
    heads = caches[0].shape[2] if device.type == "cpu" else q_THD.shape[1]
    k_RHSD, v_RHSD = _gather(caches, slots_RS.masked_fill_(unused_RS, 0), heads, q_THD.dtype)
    q_RHMD = q_THD[token_RM.clamp(max=num_tokens - 1)].transpose(1, 2)
    if sinks is not None:
        tile_RHMD = _sink_attention(q_RHMD, k_RHSD, v_RHSD, hidden_RMS, scale, sinks)
    else:
        bias_RMS = q_THD.new_zeros(hidden_RMS.shape).masked_fill_(hidden_RMS, torch.finfo(q_THD.dtype).min)
        tile_RHMD = F.scaled_dot_product_attention(
            q_RHMD, k_RHSD, v_RHSD, attn_mask=bias_RMS[:, None], scale=scale, enable_gqa=heads != q_THD.shape[1]
        )
    target_RM = torch.where(real_RM, token_RM, num_tokens).long()
    out_THD.index_copy_(0, target_RM.view(-1), tile_RHMD.transpose(1, 2).flatten(0, 1))


def _leading_slots(block_table: Tensor, num_keys: int, block_size: int) -> Tensor:
    """Return slots (R, S) int32 of positions 0 to ``num_keys - 1`` of each row."""
    num_blocks = -(-num_keys // block_size)
    offsets = torch.arange(block_size, device=block_table.device, dtype=torch.int32)
    slots = torch.add(offsets, block_table[:, :num_blocks, None], alpha=block_size)
    return slots.flatten(1)[:, :num_keys]


def _gather(caches: _Caches, slots_RS: Tensor, num_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return keys and values (R, num_heads, S, D) in ``dtype``, contiguous; key heads are repeated up to
    ``num_heads``. Scales of a cache are applied in float32, and the product is rounded once.
    """
    num_kv_heads, head_dim = caches[0].shape[2:]
    head = torch.arange(num_heads, device=slots_RS.device) // (num_heads // num_kv_heads)
    # Adding to int64 heads computes in int64, so that int32 slots cannot overflow.
    index = torch.add(head[:, None], slots_RS[:, None], alpha=num_kv_heads).view(-1)
    shape = (slots_RS.shape[0], num_heads, slots_RS.shape[1], head_dim)
    found = [
        movable(cache).view(-1, head_dim).index_select(0, index).view(cache.dtype).view(shape) for cache in caches[:2]
    ]
    if (scales := caches[2]) is not None:
        factors = scales[:, head, None, None]
        found = [stored.float() * factor for stored, factor in zip(found, factors, strict=True)]
    return [stored.to(dtype) for stored in found]
