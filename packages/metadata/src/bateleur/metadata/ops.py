"""The ``torch.library`` operators of this package, in ``torch.ops.bateleur``.

Importing this module defines them. ``write_kv`` and ``paged_attention`` have the vectorised torch form on CPU and CUDA.
``rotate_and_write_kv`` and ``triton_paged_attention`` have Triton kernels on CUDA, which load with the first call, and
the torch form on CPU. Their specification is :mod:`bateleur.metadata.backends.reference`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library

from bateleur.metadata.backends import _forms, _native
from bateleur.metadata.forms import F, Forms, define, undispatched

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
    name: str | None = None,
) -> F:
    """triton: name of the kernels' form."""
    forms = Forms(form, triton=triton and f"bateleur.metadata.kernels.paged_attention:{triton}")
    return define(_library, form, forms, mutates=mutates, fake=fake, name=name)


write_kv = _define(_forms.write_kv, fake=_nothing, mutates=("k_cache", "v_cache"))
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64) -> None``.

Slot -1 stores nothing: it may write zeros to slot 0 of the null block, which must be zero anyway.
"""

rotate_and_write_kv = _define(
    _forms.rotate_and_write_kv,
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

paged_attention = _define(_forms.paged_attention)
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window) -> (T, Hq, D)``.

Row ``r < num_decodes`` computes token ``r``, if it has one. ``sliding_window`` 0 means none. Tokens of no row
give 0.
"""

triton_paged_attention = _define(
    _forms.counted_paged_attention,
    mutates=("counters",),
    fake=_like_queries,
    triton="paged_attention",
    name="triton_paged_attention",
)
"""As ``paged_attention``, whatever ``num_decodes`` is, with ``counters`` (4096,) int32 behind the other arguments.

They are 0 before a call and after it: calls that share them run one after the other, as in one stream.
"""

native_write_kv = undispatched(
    _define(_native.write_kv, fake=_nothing, mutates=("q", "k_cache", "v_cache"), name="native_write_kv"),
    _native.write_kv,
)
"""As ``rotate_and_write_kv``; on CPU compiled."""

native_paged_attention = undispatched(
    _define(_native.paged_attention, name="native_paged_attention"), _native.paged_attention
)
"""As ``paged_attention``; on CPU compiled."""
