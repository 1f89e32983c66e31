"""Backends by name, created when asked for: importing this loads none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bateleur.metadata.backends.base import AttentionBackend


def _torch() -> AttentionBackend:
    from bateleur.metadata.backends.torch_paged import TorchBackend

    return TorchBackend()


def _triton() -> AttentionBackend:
    from bateleur.metadata.backends.triton_paged import TritonBackend

    return TritonBackend()


def _reference() -> AttentionBackend:
    from bateleur.metadata.backends.reference import ReferenceBackend

    return ReferenceBackend()


def _torch_varlen() -> AttentionBackend:
    from bateleur.metadata.backends.torch_varlen import TorchVarlenBackend

    return TorchVarlenBackend()


def _flashinfer() -> AttentionBackend:
    from bateleur.metadata.backends.flashinfer import FlashInferBackend

    return FlashInferBackend()


_CREATORS: Mapping[str, Callable[[], AttentionBackend]] = {
    "torch": _torch,
    "reference": _reference,
    "triton": _triton,
    "torch_varlen": _torch_varlen,
    "flashinfer": _flashinfer,
}
_AUTO = {"cuda": ("triton", "torch")}  # the order of preference; the reference is never chosen unasked
_AUTO_ELSEWHERE = ("torch",)


def names() -> tuple[str, ...]:
    """Names :func:`get_backend` takes, besides ``auto``."""
    return tuple(_CREATORS)


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
    if name != "auto" and name not in _CREATORS:
        raise ValueError(f"name: no backend is called {name!r}; there are auto, {', '.join(names())}")
    device = torch.device(device)
    reasons = []
    for candidate in _AUTO.get(device.type, _AUTO_ELSEWHERE) if name == "auto" else (name,):
        backend = _CREATORS[candidate]()
        reason = backend.unsupported(head_dim, dtype, device, sliding_window)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"name: no backend for {name!r}; {'; '.join(reasons)}")
