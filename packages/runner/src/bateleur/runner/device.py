"""Where a model runs, in which dtype, and sending it what the host decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of weights, activations and states, by the names that a user may say."""


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is CUDA where there is one. Raises ValueError for a device that is unknown or absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if resolved.type not in ("cpu", "cuda") or (resolved.type == "cpu" and resolved.index):
        raise ValueError(f"device is {device!r}; supported are 'cpu' and 'cuda'")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices")
    return resolved


@contextmanager
def naming_memory(**arguments: object) -> Iterator[None]:
    """Names what was asked for where an allocation fails: a ValueError in place of what numpy or torch raise."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        asked = ", ".join(f"{name} = {value}" for name, value in arguments.items())
        raise ValueError(f"{asked}; there is no memory for so much") from error


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Host to device without waiting; the caller has made the array for this, and does not write to it again."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
