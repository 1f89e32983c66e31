"""The ``torch.library`` operators of this package, in ``torch.ops.bateleur``.

Importing this module defines them. ``write_kv`` and ``paged_attention`` have the vectorised torch form on CPU and CUDA.
``rotate_and_write_kv``, ``attention_work`` and ``triton_paged_attention`` have Triton kernels on CUDA, which load with
the first call, and the torch form on CPU. Their specification is :mod:`bateleur.metadata.backends.reference`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library

from bateleur.metadata.backends import _native_ops, _torch_ops, _work_list
from bateleur.metadata.dispatch import F, Implementations, define_op, skip_dispatcher

_library = Library("bateleur", "FRAGMENT")


def _nothing(*_: object) -> None:
    """The fake form of what only writes to its arguments."""


def _like_queries(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _define(
    form: F,
    *,
    fake: Callable[..., Any] = _like_queries,
    mutates: tuple[str, ...] = (),
    triton: str | None = None,
    home: str = "cuda_ops",
    name: str | None = None,
) -> F:
    """triton, home: name of the kernels' form, and its module."""
    forms = Implementations(form, triton=triton and f"bateleur.metadata.kernels.{home}:{triton}")
    return define_op(_library, form, forms, mutates=mutates, fake=fake, name=name)


write_kv = _define(_torch_ops.write_kv, fake=_nothing, mutates=("k_cache", "v_cache"))
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64) -> None``.

Slot -1 stores nothing: it may write zeros to slot 0 of the null block, which must be zero anyway.
"""

rotate_and_write_kv = _define(
    _torch_ops.rotate_and_write_kv,
    fake=_nothing,
    mutates=("q", "k_cache", "v_cache"),
    triton="rotate_and_write_kv",
)
"""``(q (T, Hq, D), k (T, Hkv, D), v, k_cache, v_cache, slot_mapping, cos (T, 1, R) or None, sin, q_norm (D,), (Hq * D,)
or None, k_norm (D,), (Hkv * D,) or None, eps) -> None``.

Normalises and rotates ``q`` in place, and stores as ``write_kv`` does the keys that went through the same; ``k`` stays
as it is. Without ``cos`` and ``sin`` nothing turns. Weights of a head make a norm of each head, weights of all heads
one of all of a token, in float32, rounded before it turns; without them there is none.
"""

paged_attention = _define(_torch_ops.paged_attention)
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window) -> (T, Hq, D)``.

Row ``r < num_decodes`` computes token ``r``, if it has one. ``sliding_window`` 0 means none. Tokens of no row
give 0.
"""

attention_work = _define(
    _work_list.attention_work, fake=_work_list.empty_work_list, triton="attention_work", home="work_list"
)
"""``(k_cache, seq_lens (R,) int32, query_start_loc (R + 1,) int32, num_heads, num_tokens, max_query_len,
sliding_window) -> (n, 8) int32``: the work list that ``triton_paged_attention`` reads.

One list serves all layers of a forward pass whose caches have the shape and dtype of ``k_cache``, but for the number
of blocks. ``num_tokens``, ``max_query_len`` and ``sliding_window`` must be those of the attention. n follows from
shapes and host numbers alone, and every entry is defined. :mod:`bateleur.metadata.backends._work_list` describes
entries.
"""

triton_paged_attention = _define(
    _torch_ops.paged_attention_ignoring_work,
    fake=_like_queries,
    triton="paged_attention",
    name="triton_paged_attention",
)
"""As ``paged_attention``, but ``num_decodes`` has no effect. One more argument, ``work``: what ``attention_work`` made
of the same rows, or None, so that the call makes it.
"""

native_write_kv = skip_dispatcher(
    _define(_native_ops.write_kv, fake=_nothing, mutates=("q", "k_cache", "v_cache"), name="native_write_kv"),
    _native_ops.write_kv,
)
"""As ``rotate_and_write_kv``; on CPU compiled."""

native_paged_attention = skip_dispatcher(
    _define(_native_ops.paged_attention, name="native_paged_attention"), _native_ops.paged_attention
)
"""As ``paged_attention``; on CPU compiled."""
