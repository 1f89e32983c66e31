"""Operators of this package in ``torch.ops.bateleur``. Importing this module defines them.

``write_kv`` and ``paged_attention`` are vectorised torch on CPU and CUDA. ``rotate_and_write_kv``, ``attention_work``
and ``triton_paged_attention`` are Triton kernels on CUDA, loaded at the first call, and torch on a CPU.
:mod:`bateleur.metadata.backends.reference` is their specification.

Shapes: T tokens, R rows (requests), Hq query heads, Hkv key heads, D head dimension.
"""

from torch.library import Library

from bateleur.metadata.backends import _native_ops, _torch_ops
from bateleur.metadata.dispatch import F, Fake, Implementations, define_op, skip_dispatcher

_library = Library("bateleur", "FRAGMENT")


def _define(form: F, fake: Fake = "q", mutates: tuple[str, ...] = (), triton: str = "", name: str = "") -> F:
    forms = Implementations(form, triton=f"bateleur.metadata.kernels.cuda_ops:{triton}" if triton else None)
    return define_op(_library, form, forms, mutates=mutates, fake=fake, name=name or None)


write_kv = _define(_torch_ops.write_kv, fake=None, mutates=("k_cache", "v_cache"))
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64, kv_scales (2, Hkv)
float32 or None) -> None``.

Stores keys and values by slot. A token with slot -1 is not stored; it may write zeros to slot 0 of the null block,
which must be zero anyway. Caches may have another dtype than keys. With ``kv_scales``, of keys and of values,
``x / scale`` is stored, computed in float32. float8_e4m3fn caches saturate at 448 and keep NaN.
"""

rotate_and_write_kv = _define(
    _torch_ops.rotate_and_write_kv, fake=None, mutates=("q", "k_cache", "v_cache"), triton="rotate_and_write_kv"
)
"""``(q (T, Hq, D), k (T, Hkv, D), v, k_cache, v_cache, slot_mapping, cos (T, 1, R) or None, sin, q_norm (D,), (Hq * D,)
or None, k_norm (D,), (Hkv * D,) or None, eps, kv_scales (2, Hkv) float32 or None) -> None``.

Applies RMS norm and rotary embedding to ``q`` in place. Applies both to ``k`` and stores the result and ``v`` like
``write_kv``; ``k`` itself does not change. Without ``cos`` and ``sin`` there is no rotation, without weights no norm.
Weights (D,) mean a norm over each head, longer ones a norm over all heads of a token. The norm is computed in float32
and rounded before the rotation.
"""

paged_attention = _define(_torch_ops.paged_attention)
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window, work or None, sinks (Hq,) float32 or
None, kv_scales (2, Hkv) float32 or None) -> (T, Hq, D)``.

Row ``r < num_decodes`` has token ``r`` or none. ``sliding_window`` 0 means no window. Padded tokens give 0. ``sinks``
has a score for each query head, of a key without a value that every query sees; the scale does not apply to it. Keys
and values are what the caches hold, times the scale of their head. ``work`` is ignored.
"""

attention_work = _define(_torch_ops.attention_work, fake=_torch_ops.attention_work, triton="attention_work")
"""``(k_cache, seq_lens (R,) int32, query_start_loc (R + 1,) int32, num_heads, num_tokens, max_query_len,
sliding_window, dtype or None) -> (n, 8) int32``: the work list of ``triton_paged_attention``.

One list serves all layers of a forward pass whose queries are in ``dtype`` (None: that of ``k_cache``) and whose caches
have the shape of ``k_cache``; the number of blocks may differ. ``num_tokens``, ``max_query_len`` and
``sliding_window`` must equal those of the attention call. n depends only on shapes, dtypes and host numbers.
:mod:`bateleur.metadata.kernels.work_list` describes the entries. On a CPU they are 0, because nothing reads them.
"""

triton_paged_attention = _define(_torch_ops.paged_attention, triton="paged_attention", name="triton_paged_attention")
"""Like ``paged_attention``, but ignores ``num_decodes``. ``work`` is the result of ``attention_work`` for the same
rows; if it is None, the call computes it.
"""

native_write_kv = skip_dispatcher(
    _define(_native_ops.write_kv, fake=None, mutates=("q", "k_cache", "v_cache"), name="native_write_kv"),
    _native_ops.write_kv,
)
"""Like ``rotate_and_write_kv`` without norms; C on a CPU."""

native_paged_attention = skip_dispatcher(
    _define(_native_ops.paged_attention, name="native_paged_attention"), _native_ops.paged_attention
)
"""Like ``paged_attention``; C on a CPU."""
