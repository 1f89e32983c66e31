"""The ``torch.library`` operators of this package, in ``torch.ops.bateleur``.

Importing this module defines them. ``write_kv`` and ``paged_attention`` have the vectorised torch form on CPU and CUDA.
``rotate_and_write_kv`` and ``triton_paged_attention`` have Triton kernels on CUDA, which load with the first call, and
the torch form on CPU. Their specification is :mod:`bateleur.metadata.backends.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from bateleur.metadata.backends import _forms, _fused_forms

_ATTENTION = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "int num_decodes, int max_query_len, int max_seq_len, float scale, int sliding_window) -> Tensor"
)
_library = torch.library.Library("bateleur", "FRAGMENT")
_library.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()"
)
_library.define(
    "rotate_and_write_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "Tensor slot_mapping, Tensor? cos, Tensor? sin) -> ()"
)
_library.define("paged_attention" + _ATTENTION)
_library.define("triton_paged_attention" + _ATTENTION)


@cache
def _triton_form(name: str) -> Callable[..., Any]:
    form: Callable[..., Any] = getattr(import_module("bateleur.metadata.kernels.paged_attention"), name)
    return form


for _name in ("write_kv", "rotate_and_write_kv"):
    _library.impl(_name, lambda *_: None, "Meta")
for _name in ("paged_attention", "triton_paged_attention"):
    _library.impl(_name, lambda q, *_: q.new_empty(q.shape), "Meta")
    _library.impl(_name, _forms.paged_attention, "CPU")
_library.impl("write_kv", _forms.write_kv, "CPU")
_library.impl("rotate_and_write_kv", _fused_forms.rotate_and_write_kv, "CPU")
_library.impl("write_kv", _forms.write_kv, "CUDA")
_library.impl("paged_attention", _forms.paged_attention, "CUDA")
_library.impl("rotate_and_write_kv", lambda *args: _triton_form("rotate_and_write_kv")(*args), "CUDA")
_library.impl("triton_paged_attention", lambda *args: _triton_form("paged_attention")(*args), "CUDA")

write_kv: Any = torch.ops.bateleur.write_kv.default
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64) -> None``.

Slot -1 stores nothing: it may write zeros to slot 0 of the null block, which must be zero anyway.
"""

rotate_and_write_kv: Any = torch.ops.bateleur.rotate_and_write_kv.default
"""``(q (T, Hq, D), k (T, Hkv, D), v, k_cache, v_cache, slot_mapping, cos (T, 1, R) or None, sin) -> None``.

Rotates ``q`` in place, and stores as ``write_kv`` does the keys rotated; ``k`` stays as it is. Without ``cos`` and
``sin`` nothing turns.
"""

paged_attention: Any = torch.ops.bateleur.paged_attention.default
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window) -> (T, Hq, D)``.

Row ``r < num_decodes`` computes token ``r``, if it has one. ``sliding_window`` 0 means none. Tokens of no row
give 0.
"""

triton_paged_attention: Any = torch.ops.bateleur.triton_paged_attention.default
"""As ``paged_attention``."""
