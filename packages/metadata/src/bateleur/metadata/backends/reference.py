"""Reference paged attention: loops in float64, on any device. The specification of the operators."""

from itertools import pairwise

import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import GraphSupport
from bateleur.metadata.backends.base import AttentionBackend, KVCache, PagedAttentionMetadata


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store keys and values (T, Hkv, D) in slots (T,) of caches (blocks, block_size, Hkv, D); -1 stores nothing.

    If a token is skipped, slot 0 of the null block becomes zero.
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(max(slot, 0), block_size)
        k_cache[block, offset] = k[token] if slot >= 0 else 0
        v_cache[block, offset] = v[token] if slot >= 0 else 0


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention (T, Hq, D) of queries (T, Hq, D) over the paged cache, in the dtype of ``q``.

    Row ``r`` owns tokens ``query_start_loc[r]:query_start_loc[r + 1]``, the last of its ``seq_lens[r]`` positions.
    Query position ``i`` sees key ``j`` if ``i - sliding_window < j <= i`` (0: no window). Query head ``h`` reads key
    head ``h // (Hq // Hkv)``. Padded tokens, and rows without keys, give 0. ``sinks`` (Hq,) are scores of a further
    key, which has no value.
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
            k = k_cache[blocks, keys % block_size].double().repeat_interleave(group, dim=1)
            v = v_cache[blocks, keys % block_size].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,shd->hs", q[token].double(), k) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            weights = scores.softmax(-1)[:, : len(keys)]
            out[token] = torch.einsum("hs,shd->hd", weights, v).to(q.dtype)
    return out


class ReferenceBackend(AttentionBackend):
    """Loops over tokens: exact and slow, for comparison."""

    name = "reference"
    graph_support = GraphSupport.NEVER  # loops read lengths on the host
    write = staticmethod(write_kv_reference)

    def attend_cache(
        self,
        q: Tensor,
        kv: KVCache,
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        work: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`AttentionBackend.attend_cache`."""
        rows = meta.block_table, meta.seq_lens, meta.query_start_loc
        return paged_attention_reference(q, *kv, *rows, scale, sliding_window or 0, sinks)
