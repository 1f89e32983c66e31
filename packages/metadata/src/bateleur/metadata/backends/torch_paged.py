"""Vectorised paged attention in torch: the default on CPU, and what a GPU runs where no kernel fits."""

from __future__ import annotations

import torch

from bateleur.metadata import ops
from bateleur.metadata.backends.base import AttentionBackend


class TorchBackend(AttentionBackend):
    """Paged attention through the operators of :mod:`bateleur.metadata.ops`."""

    name = "torch"
    write = staticmethod(ops.write_kv)
    kernel = staticmethod(ops.paged_attention)

    def unsupported(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run here, or None if it can."""
        if device.type not in ("cpu", "cuda"):
            return f"device {device} is neither CPU nor CUDA"
        return super().unsupported(head_dim, dtype, device, sliding_window)
