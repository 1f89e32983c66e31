"""Paged-attention backends: a builder and kernels each, by name or by what they can do, loaded when asked for."""

from collections.abc import Mapping

import torch

from bateleur.metadata.backends.base import AttentionBackend, PagedAttentionBuilder, PagedAttentionMetadata
from bateleur.metadata.dispatch import load

__all__ = [
    "AttentionBackend",
    "PagedAttentionBuilder",
    "PagedAttentionMetadata",
    "backend_names",
    "get_backend",
    "preferred_backends",
    "unsupported_reason",
]

_HOMES: Mapping[str, str] = {
    "torch": "torch_paged:TorchBackend",
    "native": "native_paged:NativeBackend",
    "reference": "reference:ReferenceBackend",
    "triton": "triton_paged:TritonBackend",
    "torch_varlen": "torch_varlen:TorchVarlenBackend",
    "flashinfer": "flashinfer:FlashInferBackend",
}


def backend_names() -> tuple[str, ...]:
    """Names :func:`get_backend` takes, besides ``auto``."""
    return tuple(_HOMES)


def preferred_backends(device: torch.device) -> tuple[str, ...]:
    """What ``auto`` tries on a device, in this order; any other has to be asked for."""
    return ("triton", "torch") if device.type == "cuda" else ("native", "torch")


def unsupported_reason(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    sliding_window: int | None = None,
) -> str | None:
    """Why the backend ``name`` can't serve the configuration, or None if it can."""
    return _load(name).unsupported_reason(head_dim, dtype, device, sliding_window)


def get_backend(
    name: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    sliding_window: int | None = None,
) -> AttentionBackend:
    """The backend ``name``, or with ``auto`` the first that supports the configuration.

    Raises:
        ValueError: no such backend, or it refuses the configuration; the message says why.
    """
    if name != "auto" and name not in _HOMES:
        raise ValueError(f"name: no backend is called {name!r}; there are auto, {', '.join(backend_names())}")
    device = torch.device(device)
    reasons = []
    for candidate in preferred_backends(device) if name == "auto" else (name,):
        backend = _load(candidate)
        reason = backend.unsupported_reason(head_dim, dtype, device, sliding_window)
        if reason is None:
            backend.device = device
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"name: no backend for {name!r}; {'; '.join(reasons)}")


def _load(name: str) -> AttentionBackend:
    backend: AttentionBackend = load(f"bateleur.metadata.backends.{_HOMES[name]}")()
    return backend
