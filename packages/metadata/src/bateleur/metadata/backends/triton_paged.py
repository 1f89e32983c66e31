"""Paged attention in Triton, with norms and rotary embedding fused into the KV write: the default on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import (
    KV_DTYPES,
    AttentionBackend,
    KVCache,
    PagedAttentionMetadata,
    device_refusal,
    kernel_row_args,
)

_MAX_HEAD_DIM = 256
_FP8_CAPABILITY = (8, 9)


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
    kv_dtypes = KV_DTYPES
    min_capability = (8, 0)  # bfloat16 and asynchronous copies
    write = staticmethod(ops.rotate_and_write_kv)
    kernel: ClassVar[Callable[..., Any]] = staticmethod(ops.triton_paged_attention)

    def build_work_list(
        self,
        meta: PagedAttentionMetadata,
        kv: KVCache,
        num_heads: int,
        sliding_window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the work list of a forward pass in one launch, (n, 8) int32: one entry a query tile and KV split."""
        bounds = num_heads, meta.slot_mapping.shape[0], meta.max_query_len, sliding_window or 0
        return ops.attention_work(kv[0], meta.seq_lens, meta.query_start_loc, *bounds, dtype)

    def attend_cache(
        self,
        q: Tensor,
        kv: KVCache,
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        work: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Return attention (T, Hq, D) over the cache, 0 for padded tokens, by the Triton operator."""
        rows = kernel_row_args(meta)
        out: Tensor = self.kernel(q, *kv, *rows, scale, sliding_window or 0, work, sinks, kv_scales)
        return out

    def unsupported_reason(
        self,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        sliding_window: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Return why a configuration is not supported, or None. FP8 caches need compute capability 8.9."""
        reason = super().unsupported_reason(head_dim, dtype, device, sliding_window, kv_dtype)
        if reason is None and kv_dtype == torch.float8_e4m3fn:
            reason = device_refusal(device, _FP8_CAPABILITY)
        return reason

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """Return that the head dimension is too large or Triton is not installed, or None."""
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        return "triton is not installed" if find_spec("triton") is None else None
