"""Vectorised paged attention in torch: the default on CPU, and what a GPU runs where no kernel fits."""

from __future__ import annotations

from typing import ClassVar

import torch

from bateleur.metadata.backends._template import PagedBackend
from bateleur.metadata.backends.base import unsupported_arguments


class TorchBackend(PagedBackend):
    """Paged attention through the operators of :mod:`bateleur.metadata.ops`."""

    name: ClassVar[str] = "torch"

    def unsupported(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run, or None."""
        if device.type not in ("cpu", "cuda"):
            return f"device {device} is neither CPU nor CUDA"
        return unsupported_arguments(head_dim, dtype, sliding_window)
