"""Paged attention in Triton, with norms and rotary embedding fused into the KV write: the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import AttentionBackend, KVCache, PagedAttentionMetadata, kernel_row_args

_MAX_HEAD_DIM = 256


class TritonBackend(AttentionBackend):
    """Paged attention by the Triton operators.

    Triton is loaded at the first call on a CUDA tensor. CPU tensors use the torch implementations. ``attend`` rotates
    ``q`` in place.
    """

    name = "triton"
    fuses_rotary = True
    fuses_norm = True
    tolerates_loose_bounds = True
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    min_capability = (8, 0)  # bfloat16 and asynchronous copies
    write = staticmethod(ops.rotate_and_write_kv)
    kernel: ClassVar[Callable[..., Any]] = staticmethod(ops.triton_paged_attention)

    def build_work_list(
        self, meta: PagedAttentionMetadata, kv: KVCache, num_heads: int, sliding_window: int | None = None
    ) -> Tensor:
        """Compute the work list of the pass, (n, 8) int32, in one launch."""
        bounds = num_heads, meta.slot_mapping.shape[0], meta.max_query_len, sliding_window or 0
        return ops.attention_work(kv[0], meta.seq_lens, meta.query_start_loc, *bounds)

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
        out: Tensor = self.kernel(q, *kv, *kernel_row_args(meta), scale, sliding_window or 0, work, sinks)
        return out

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """See :meth:`AttentionBackend.missing_requirement`."""
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        return "triton is not installed" if find_spec("triton") is None else None
