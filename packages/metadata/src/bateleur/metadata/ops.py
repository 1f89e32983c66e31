"""The ``torch.library`` operators of this package: ``bateleur::write_kv`` and ``bateleur::paged_attention``.

Importing this module defines them, with the vectorised torch form for CPU and CUDA. Their specification is
:mod:`bateleur.metadata.backends.reference`.
"""

from __future__ import annotations

from typing import Any

import torch

from bateleur.metadata.backends import _forms

_library = torch.library.Library("bateleur", "FRAGMENT")
_library.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()"
)
_library.define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, int num_decodes, int max_query_len, int max_seq_len, float scale, "
    "int sliding_window) -> Tensor"
)
_library.impl("write_kv", lambda *_: None, "Meta")
_library.impl("paged_attention", lambda q, *_: torch.empty_like(q), "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("write_kv", _forms.write_kv, _key)
    _library.impl("paged_attention", _forms.paged_attention, _key)

write_kv: Any = torch.ops.bateleur.write_kv.default
"""``(k (T, Hkv, D), v, k_cache (blocks, block_size, Hkv, D), v_cache, slot_mapping (T,) int64) -> None``.

Slot -1 stores nothing: it writes zeros to slot 0 of the null block, which must be zero anyway.
"""

paged_attention: Any = torch.ops.bateleur.paged_attention.default
"""``(q (T, Hq, D), k_cache, v_cache, block_table (R, max_blocks) int32, seq_lens (R,) int32, query_start_loc
(R + 1,) int32, num_decodes, max_query_len, max_seq_len, scale, sliding_window) -> (T, Hq, D)``.

Row ``r < num_decodes`` computes token ``r``, if it has one. ``sliding_window`` 0 means none. Tokens of no row
give 0.
"""
