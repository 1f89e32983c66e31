"""Paged attention in C, with the rotary embedding fused into the write: the default on a CPU with a compiler."""

import torch

from bateleur.metadata import native, ops
from bateleur.metadata.backends.base import AttentionBackend


class NativeBackend(AttentionBackend):
    """Paged attention through the compiled forms of the operators.

    A query has the same bits whatever is beside it, and however a prompt is cut. ``attend`` rotates
    ``q`` in place.
    """

    name = "native"
    fuses_rotary = True
    dtypes = (torch.float32, torch.bfloat16)
    write = staticmethod(ops.native_write_kv)
    kernel = staticmethod(ops.native_paged_attention)

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing here for heads of any size; None if nothing is."""
        if device.type != "cpu":
            return f"device {device} is not a CPU"
        return native.unavailable_reason()
