"""Paged attention in Triton kernels, with the rotary embedding fused into the write: the default on CUDA."""

from importlib.util import find_spec

import torch

from bateleur.metadata import ops
from bateleur.metadata.backends.base import AttentionBackend

_MAX_HEAD_DIM = 256


class TritonBackend(AttentionBackend):
    """Paged attention through the fused operators of :mod:`bateleur.metadata.ops`.

    Triton loads with the first call on a CUDA tensor; on a CPU tensor the operators run their torch forms. ``attend``
    rotates ``q`` in place.
    """

    name = "triton"
    fuses_rotary = True
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    least_capability = (8, 0)  # bfloat16 and asynchronous copies
    write = staticmethod(ops.rotate_and_write_kv)
    kernel = staticmethod(ops.triton_paged_attention)

    def lacks(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing for heads of this size here, or for any; None if nothing is."""
        if head_dim > _MAX_HEAD_DIM:
            return f"head_dim {head_dim} is above {_MAX_HEAD_DIM}"
        return "triton is not installed" if find_spec("triton") is None else None
