"""Reference paged attention: loops in float64, on any device. The specification of the operators."""

from itertools import pairwise

import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import GraphSupport
from bateleur.metadata.backends.base import (
    KV_DTYPES,
    AttentionBackend,
    AttentionOptions,
    KVCache,
    PagedAttentionMetadata,
)


def write_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Store keys and values (T, Hkv, D) in slots (T,) of caches (blocks, block_size, Hkv, D); -1 stores nothing.

    If a token is skipped, slot 0 of the null block becomes zero. With ``kv_scales`` (2, Hkv) float32, the scales of
    keys and of values, ``x / scale`` is stored, computed in float32. float8_e4m3fn caches saturate at 448 and keep NaN.
    """
    block_size = k_cache.shape[1]
    for new, cache, scale_H in zip(
        (k, v), (k_cache, v_cache), (None, None) if kv_scales is None else kv_scales, strict=True
    ):
        stored = new if scale_H is None else new.float() / scale_H[:, None]
        if cache.dtype == torch.float8_e4m3fn:
            stored = stored.float().clamp(-448, 448)
        for token, slot in enumerate(slot_mapping.tolist()):
            block, offset = divmod(max(slot, 0), block_size)
            cache[block, offset] = stored[token].to(cache.dtype) if slot >= 0 else 0


def paged_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    scale: float, sliding_window: int = 0, sinks: Tensor | None = None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention (T, Hq, D) of queries (T, Hq, D) over the paged cache, in the dtype of ``q``.

    Row ``r`` (a request) owns tokens ``query_start_loc[r]:query_start_loc[r + 1]``, the last of its ``seq_lens[r]``
    positions. Query position ``i`` sees key ``j`` if ``i - sliding_window < j <= i`` (0: no window). Query head ``h``
    reads key head ``h // (Hq // Hkv)``. Padded tokens, and rows without keys, give 0. ``sinks`` (Hq,) are scores of a
    further key, which has no value. With ``kv_scales`` (2, Hkv), the stored keys and values are multiplied by the scale
    of their head.
    """
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            position = lengths[row] - (end - token)
            first = max(0, position - sliding_window + 1) if sliding_window else 0
            keys = torch.arange(first, position + 1, device=q.device)
            if not len(keys):
                continue
            blocks = block_table[row].long()[keys // block_size]
            k, v = (cache[blocks, keys % block_size].double() for cache in (k_cache, v_cache))
            if kv_scales is not None:
                k, v = k * kv_scales[0, :, None], v * kv_scales[1, :, None]
            k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
            scores = torch.einsum("hd,shd->hs", q[token].double(), k) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[token] = torch.einsum("hs,shd->hd", weights, v).to(q.dtype)
    return out


class ReferenceBackend(AttentionBackend):
    """Paged attention by loops over tokens: exact and slow, for comparison with other backends."""

    name = "reference"
    graph_support = GraphSupport.NEVER  # loops read lengths on the host
    kv_dtypes = KV_DTYPES
    write = staticmethod(write_kv_reference)

    def attend_cache(self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, options: AttentionOptions) -> Tensor:
        """Return attention (T, Hq, D) over the cache, by :func:`paged_attention_reference`."""
        rows = meta.block_table, meta.seq_lens, meta.query_start_loc
        scale, window, _, sinks, kv_scales = options
        return paged_attention_reference(q, *kv, *rows, scale, window or 0, sinks, kv_scales)
