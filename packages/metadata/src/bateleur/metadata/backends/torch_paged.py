"""Vectorised paged attention in torch: the default on CPU, and the one GPU form until kernels follow."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import (
    PagedAttentionBuilder,
    PagedAttentionMetadata,
    unsupported_arguments,
)


class TorchBackend:
    """Paged attention through the operators of :mod:`bateleur.metadata.ops`."""

    name: ClassVar[str] = "torch"
    fuses_rotary: ClassVar[bool] = False
    needs_finite_cache: ClassVar[bool] = False

    def builder(self) -> PagedAttentionBuilder:
        """A builder for one KV-cache group or many."""
        return PagedAttentionBuilder()

    def unsupported(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run, or None."""
        if device.type not in ("cpu", "cuda"):
            return f"device {device} is neither CPU nor CUDA"
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
        """Store ``k`` and ``v``, then attend; see :class:`AttentionBackend`."""
        if rotary is not None:
            raise ValueError(
                f"rotary: the backend {self.name!r} takes queries and keys that are rotated already"
            )
        k_cache, v_cache = kv
        ops.write_kv(k, v, k_cache, v_cache, meta.slot_mapping)
        out: Tensor = ops.paged_attention(
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
