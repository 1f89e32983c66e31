"""Ways of capturing: `cuda`, `recorded` and `eager`."""

from __future__ import annotations

import torch

from bateleur.cudagraph.backends.base import GraphBackend
from bateleur.cudagraph.backends.cuda import CudaBackend
from bateleur.cudagraph.backends.eager import EagerBackend
from bateleur.cudagraph.backends.recorded import RecordedBackend


def get_backend(name: str, device: torch.device | str) -> GraphBackend:
    """A new backend for bodies that run on `device`. Its recordings share memory with each other and no others.

    Args:
        name: `cuda` (CUDA graphs), `recorded` (their semantics on the CPU), `eager` (no graphs), or `auto`: `cuda` on
            a CUDA device, else `eager`.
        device: where the tensors of the bodies are.

    Raises:
        ValueError: there is no such backend, or not on this device.
    """
    device = torch.device(device)
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "eager"
    if name == "cuda":
        return CudaBackend(device)
    if name == "eager":
        return EagerBackend()
    if name != "recorded":
        raise ValueError(f"name={name!r} must be auto, cuda, recorded or eager")
    if device.type != "cpu":
        raise ValueError(f"name='recorded' records on the CPU; device={device} must be cpu")
    return RecordedBackend()
