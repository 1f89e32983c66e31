"""Paged attention in C, with rotary embedding fused into the KV write: the default on a CPU with a compiler."""

import torch

from bateleur.metadata import native, ops
from bateleur.metadata.backends.base import AttentionBackend


class NativeBackend(AttentionBackend):
    """Paged attention by the C operators.

    The result of a query does not depend on the other requests or on prompt chunking, bit for bit. ``attend`` rotates
    ``q`` in place. Users select backends by name, so the operators have no ``dispatch.Implementations``.
    """

    name = "native"
    fuses_rotary = True
    dtypes = (torch.float32, torch.bfloat16)
    kv_dtypes = (torch.float8_e4m3fn, torch.bfloat16)
    write = staticmethod(ops.native_write_kv)
    kernel = staticmethod(ops.native_paged_attention)

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """Return that the device is not a CPU or that there is no C compiler, or None."""
        if device.type != "cpu":
            return f"device {device} is not a CPU"
        return native.unavailable_reason()
