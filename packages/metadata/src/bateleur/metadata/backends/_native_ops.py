"""C implementations of the paged-attention operators for CPU tensors. Shapes and strides are checked here."""

from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bateleur.metadata import native
from bateleur.metadata.backends import _torch_ops

_SUFFIX = {torch.float32: "float", torch.bfloat16: "bf16"}
_CACHES = {**_SUFFIX, torch.float8_e4m3fn: "fp8"}
_KINDS = {dtype: kind for kind, dtype in enumerate(_CACHES)}
"""Numbers of the dtypes of caches, as in attention.c."""
_SIGNATURES = (
    *((f"write_{suffix}", "=" + "p" * 9 + "l" * 11) for suffix in _SUFFIX.values()),
    *((f"attend_{suffix}", "=" + "p" * 9 + "l" * 12 + "fi") for suffix in _CACHES.values()),
)
_kernels = cache(partial(native.kernels, Path(native.__file__).parent / "attention.c", _SIGNATURES))


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    cos: Tensor | None, sin: Tensor | None, kv_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate ``q`` in place, and store rotated keys and values in the slots of the KV cache, in C. Slot -1 stores
    nothing. Same arguments as ``ops.rotate_and_write_kv`` without norms.

    Raises IndexError if a slot is outside of the cache. Nothing is stored then.
    """
    heads, size = q.shape[1:]
    _torch_ops.check_slots(k, v, slot_mapping)
    fits = all(map(_by_heads, (q, k, v))) and q.dtype == k.dtype and _stored(q, k_cache, v_cache)
    fits = fits and slot_mapping.dtype == torch.int64 and k.shape[1:] == k_cache.shape[2:]
    if cos is not None and sin is not None:
        fits = fits and cos.dtype == q.dtype and cos.stride(2) == 1 and cos.stride() == sin.stride()
    if not (fits and _dense(k_cache, v_cache, slot_mapping) and _scales_fit(kv_scales, k_cache)):
        _torch_ops.rotate_and_write_kv(q, k, v, k_cache, v_cache, slot_mapping, cos, sin, kv_scales=kv_scales)
        return
    slots = k_cache.shape[0] * k_cache.shape[1]
    turn = (0, 0) if cos is None else (cos.stride(0), cos.shape[2])
    wrong = _kernels()[f"write_{_SUFFIX[q.dtype]}"](
        *native.pointers(q, k, v, k_cache, v_cache, slot_mapping, cos, sin, kv_scales),
        _KINDS[k_cache.dtype], k.shape[0], slots, heads, k.shape[1], size, q.stride(0), k.stride(0), v.stride(0), *turn,
    )  # fmt: skip
    if wrong:
        raise IndexError(f"slot_mapping: slot {wrong} is outside the {slots} of the cache")


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    num_decodes: int, max_query_len: int, max_seq_len: int, scale: float, sliding_window: int,
    work: Tensor | None = None, sinks: Tensor | None = None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention over a paged cache, in C. Same arguments and result as ``ops.paged_attention``.

    A query's result does not depend on the other requests.
    Raises IndexError if the block table names a block outside of the cache.
    """
    _torch_ops.check_sizes(q, k_cache, block_table, seq_lens, num_decodes, max_seq_len, sinks)
    rows, sizes = seq_lens.shape[0], (max_query_len, max_seq_len, scale, sliding_window)
    # Other dtypes and layouts go to torch. C would read past their end.
    fits = block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    fits = fits and _stored(q, k_cache, v_cache) and q.shape[2] == k_cache.shape[3] and _scales_fit(kv_scales, k_cache)
    if not (fits and block_table.stride(1) == 1 and _dense(k_cache, v_cache, seq_lens, query_start_loc)):
        rest = block_table, seq_lens, query_start_loc, num_decodes
        return _torch_ops.paged_attention(q, k_cache, v_cache, *rest, *sizes, work, sinks, kv_scales)
    if not _by_heads(q):
        q = q.contiguous()
    tokens, out = q.shape[0], q.new_empty(q.shape)
    wrong = _kernels()[f"attend_{_CACHES[k_cache.dtype]}"](
        *native.pointers(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, sinks, kv_scales, out),
        q.dtype == torch.float32, tokens, rows, q.shape[1], k_cache.shape[2], q.shape[2], q.stride(0),
        block_table.stride(0), block_table.shape[1], k_cache.shape[0], k_cache.shape[1],
        sliding_window, scale, torch.get_num_threads(),
    )  # fmt: skip
    if wrong:
        raise IndexError(
            f"block_table: row {wrong - 1}, of {int(seq_lens[wrong - 1])} tokens in a table of {block_table.shape[1]}"
            f" blocks, names a block outside the {k_cache.shape[0]} of the cache, or tokens outside the {tokens} of q"
        )
    return out


def _by_heads(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _stored(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    return q.dtype in _SUFFIX and k_cache.dtype == v_cache.dtype and k_cache.dtype in _CACHES


def _scales_fit(kv_scales: Tensor | None, k_cache: Tensor) -> bool:
    if kv_scales is None:
        return True
    return kv_scales.dtype == torch.float32 and kv_scales.shape == (2, k_cache.shape[2]) and _dense(kv_scales)


def _dense(*tensors: Tensor) -> bool:
    return all(map(Tensor.is_contiguous, tensors))
