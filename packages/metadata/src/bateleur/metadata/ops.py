"""The ``torch.library`` operators of this package, in ``torch.ops.bateleur``.

Importing this module defines them. ``write_kv`` and ``paged_attention`` have the vectorised torch form on CPU and CUDA.
``rotate_and_write_kv`` and ``triton_paged_attention`` have Triton kernels on CUDA, which load with the first call, and
the torch form on CPU. Their specification is :mod:`bateleur.metadata.backends.reference`.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library

from bateleur.metadata.backends import _forms
from bateleur.metadata.forms import Forms, define

_library = Library("bateleur", "FRAGMENT")
_TRITON = "bateleur.metadata.kernels.paged_attention:"


def _nothing(*_: object) -> None:
    """The fake form of what only writes to its arguments."""


def _like_queries(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


write_kv = define(
    _library,
    _forms.write_kv,
    Forms(_forms.write_kv),
    mutates=("k_cache", "v_cache"),
    fake=_nothing,
)
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64) -> None``.

Slot -1 stores nothing: it may write zeros to slot 0 of the null block, which must be zero anyway.
"""

rotate_and_write_kv = define(
    _library,
    _forms.rotate_and_write_kv,
    Forms(_forms.rotate_and_write_kv, triton=_TRITON + "rotate_and_write_kv"),
    mutates=("q", "k_cache", "v_cache"),
    fake=_nothing,
)
"""``(q (T, Hq, D), k (T, Hkv, D), v, k_cache, v_cache, slot_mapping, cos (T, 1, R) or None, sin) -> None``.

Rotates ``q`` in place, and stores as ``write_kv`` does the keys rotated; ``k`` stays as it is. Without ``cos`` and
``sin`` nothing turns.
"""

paged_attention = define(
    _library, _forms.paged_attention, Forms(_forms.paged_attention), mutates=(), fake=_like_queries
)
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window) -> (T, Hq, D)``.

Row ``r < num_decodes`` computes token ``r``, if it has one. ``sliding_window`` 0 means none. Tokens of no row
give 0.
"""

triton_paged_attention = define(
    _library,
    _forms.paged_attention,
    Forms(_forms.paged_attention, triton=_TRITON + "paged_attention"),
    mutates=(),
    fake=_like_queries,
    name="triton_paged_attention",
)
"""As ``paged_attention``."""
