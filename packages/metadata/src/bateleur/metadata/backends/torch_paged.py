"""Paged attention in vectorised torch: the default on a CPU without a compiler, and the fallback on a GPU."""

import torch

from bateleur.metadata import ops
from bateleur.metadata.backends.base import KV_DTYPES, AttentionBackend


class TorchBackend(AttentionBackend):
    """Paged attention through the operators of :mod:`bateleur.metadata.ops`."""

    name = "torch"
    kv_dtypes = KV_DTYPES
    write = staticmethod(ops.write_kv)
    kernel = staticmethod(ops.paged_attention)

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """Return None on a CPU or CUDA device, else the reason."""
        return None if device.type in ("cpu", "cuda") else f"device {device} is neither CPU nor CUDA"
