"""Paged attention by the operators of this package: in Triton, in C, and in torch."""

from importlib.util import find_spec

import torch
from torch import Tensor

from bateleur.metadata import native, ops
from bateleur.metadata.backends.base import (
    KV_DTYPES,
    AttentionBackend,
    KVCache,
    LayerConfig,
    PagedAttentionMetadata,
    device_refusal,
)

_MAX_HEAD_DIM = 256
_FP8_CAPABILITY = (8, 9)


class TorchBackend(AttentionBackend):
    """Paged attention in vectorised torch: the default on a CPU without a compiler, and the fallback on a GPU."""

    name = "torch"
    kv_dtypes = KV_DTYPES
    write = staticmethod(ops.write_kv)
    kernel = staticmethod(ops.paged_attention)

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return a reason if the device is neither a CPU nor CUDA, else None. Called by ``unsupported_reason``."""
        return None if config.device.type in ("cpu", "cuda") else f"device {config.device} is neither CPU nor CUDA"


class NativeBackend(AttentionBackend):
    """Paged attention in C, with rotary embedding fused into the KV write: the default on a CPU with a compiler.

    The result of a query does not depend on other requests or on prompt chunking, bit for bit. ``attend`` rotates
    ``q`` in place. The backend has operators of its own: those of :class:`TorchBackend` never call C, so that users can
    select either backend by name.
    """

    name = "native"
    fuses_rotary = True
    dtypes = (torch.float32, torch.bfloat16)
    kv_dtypes = (torch.float8_e4m3fn, torch.bfloat16)
    write = staticmethod(ops.native_write_kv)
    kernel = staticmethod(ops.native_paged_attention)

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return a reason if the device is no CPU or C kernels cannot be compiled, else None.

        Called by ``unsupported_reason``.
        """
        return native.unavailable_reason() if config.device.type == "cpu" else f"device {config.device} is not a CPU"


class TritonBackend(AttentionBackend):
    """Paged attention in Triton, with norms and rotary embedding fused into the KV write: the default on CUDA.

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
    kernel = staticmethod(ops.triton_paged_attention)

    def build_work_list(
        self, meta: PagedAttentionMetadata, kv: KVCache, num_heads: int, sliding_window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the work list of attention for a forward pass, (n, 8) int32, in one launch."""
        bounds = num_heads, meta.slot_mapping.shape[0], meta.max_query_len, sliding_window or 0
        return ops.attention_work(kv[0], meta.seq_lens, meta.query_start_loc, *bounds, dtype)

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return a reason if the head dimension is above 256, Triton is not installed, or ``config`` has an FP8 cache
        and the device is not a GPU that supports FP8; else None. Called by ``unsupported_reason``.
        """
        if config.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {config.head_dim} is above {_MAX_HEAD_DIM}"
        if find_spec("triton") is None:
            return "triton is not installed"
        return device_refusal(config.device, _FP8_CAPABILITY) if config.kv_dtype == torch.float8_e4m3fn else None
