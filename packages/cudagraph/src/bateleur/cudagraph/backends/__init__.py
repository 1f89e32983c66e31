"""Capture backends: `cuda`, `recorded` and `eager`."""

import torch

from bateleur.cudagraph.backends.base import EagerBackend, GraphBackend
from bateleur.cudagraph.backends.cuda import CudaBackend
from bateleur.cudagraph.backends.recorded import RecordedBackend


def get_backend(name: str, device: torch.device | str) -> GraphBackend:
    """Return a new capture backend. Its captures share memory with each other and with no other backend object.

    name: `cuda` (CUDA graphs), `recorded` (emulation of CUDA graphs on CPU), `eager` (no graphs), or `auto`: `cuda` on
    a CUDA device, else `eager`. Raises ValueError for another name, or if the backend does not support `device`.
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
        raise ValueError(f"name='recorded' needs device='cpu', got device={device}; use name='cuda' on a GPU")
    return RecordedBackend()
