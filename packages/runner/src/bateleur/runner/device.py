"""Where a model runs, and sending it what the host decided."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is CUDA where there is one. Raises ValueError for a device that is unknown or absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; supported are 'cpu' and 'cuda'")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    return resolved


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Host to device without waiting; the caller has made the array for this, and does not write to it again."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
