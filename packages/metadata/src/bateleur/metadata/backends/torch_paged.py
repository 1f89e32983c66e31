"""Vectorised paged attention in torch: the default on CPU, and what a GPU runs where no kernel fits."""

import torch

from bateleur.metadata import ops
from bateleur.metadata.backends.base import AttentionBackend


class TorchBackend(AttentionBackend):
    """Paged attention through the operators of :mod:`bateleur.metadata.ops`."""

    name = "torch"
    write = staticmethod(ops.write_kv)
    kernel = staticmethod(ops.paged_attention)

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing for heads of this size here, or for any; None if nothing is."""
        return None if device.type in ("cpu", "cuda") else f"device {device} is neither CPU nor CUDA"
