"""Paged attention in Triton kernels, with the rotary embedding fused into the write: the default on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import (
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    unsupported_arguments,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies


class TritonBackend:
    """Paged attention through the fused operators of :mod:`bateleur.metadata.ops`.

    Triton loads with the first call on a CUDA tensor; on a CPU tensor the operators run their torch forms.
    """

    name: ClassVar[str] = "triton"
    fuses_rotary: ClassVar[bool] = True
    needs_finite_cache: ClassVar[bool] = False

    def builder(self) -> PagedAttentionBuilder:
        """A builder for one KV-cache group or many."""
        return PagedAttentionBuilder()

    def unsupported(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run, or None."""
        if device.type != "cuda":
            return f"device {device} is not CUDA"
        if dtype not in _DTYPES:
            return f"dtype {dtype} is not one of {', '.join(str(each) for each in _DTYPES)}"
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        if find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return f"compute capability {'.'.join(map(str, capability))} is below 8.0"
        return unsupported_arguments(head_dim, dtype, sliding_window)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rotate ``q`` in place, store ``k`` and ``v``, then attend; see :class:`AttentionBackend`."""
        k_cache, v_cache = kv
        cos, sin = rotary if rotary is not None else (None, None)
        ops.rotate_and_write_kv(q, k, v, k_cache, v_cache, meta.slot_mapping, cos, sin)
        out: Tensor = ops.triton_paged_attention(
            q,
            k_cache,
            v_cache,
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            meta.num_decodes,
            meta.max_query_len,
            meta.max_seq_len,
            scale,
            sliding_window or 0,
        )
        return out
