"""Attention backends by name. Each has a metadata builder and kernels, and is loaded when it is selected."""

from collections.abc import Mapping

import torch

from bateleur.metadata.backends.base import AttentionBackend, LayerConfig, PagedAttentionBuilder, PagedAttentionMetadata
from bateleur.metadata.dispatch import load

__all__ = [
    "AttentionBackend", "LayerConfig", "PagedAttentionBuilder", "PagedAttentionMetadata", "backend_names",
    "get_backend", "preferred_backends", "unsupported_reason",
]  # fmt: skip

_PATHS: Mapping[str, str] = {
    "torch": "paged:TorchBackend",
    "native": "paged:NativeBackend",
    "reference": "reference:ReferenceBackend",
    "triton": "paged:TritonBackend",
    "torch_varlen": "torch_varlen:TorchVarlenBackend",
    "flashinfer": "flashinfer:FlashInferBackend",
}


def backend_names() -> tuple[str, ...]:
    """Return the names that :func:`get_backend` accepts, except ``auto``."""
    return tuple(_PATHS)


def preferred_backends(device: torch.device) -> tuple[str, ...]:
    """Return the names that ``auto`` tries on a device, in the order of preference."""
    return ("triton", "torch") if device.type == "cuda" else ("native", "torch")


def unsupported_reason(name: str, config: LayerConfig) -> str | None:
    """Return why the backend ``name`` cannot serve a configuration, or None if it can."""
    return _load(name).unsupported_reason(config)


def get_backend(
    name: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    sliding_window: int | None = None,
    sinks: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Return the backend ``name``; ``auto`` selects the first one that supports the configuration.

    ``name`` is ``auto`` or one of :func:`backend_names`. ``dtype`` is the dtype of queries, and of KV caches without a
    ``kv_dtype``. ``sliding_window`` is in tokens. ValueError says why a backend does not support the configuration.
    """
    if name != "auto" and name not in _PATHS:
        raise ValueError(f"name={name!r}: unknown attention backend; use auto, {', '.join(backend_names())}")
    config = LayerConfig(head_dim, dtype, torch.device(device), sliding_window, kv_dtype, sinks)
    reasons = []
    for candidate in preferred_backends(config.device) if name == "auto" else (name,):
        reason = unsupported_reason(candidate, config)
        if reason is None:
            backend = _load(candidate)
            backend.device = config.device
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"name: no backend for {name!r}; {'; '.join(reasons)}")


def _load(name: str) -> AttentionBackend:
    backend: AttentionBackend = load(f"bateleur.metadata.backends.{_PATHS[name]}")()
    return backend
