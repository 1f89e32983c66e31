"""Devices and dtypes by name, the current GPU of a thread, and copies between host and device."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import pinned as pinned
from bateleur.metadata import upload as upload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of weights, activations and states, by the names that users give."""


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; "auto" is CUDA if available. Raises ValueError if it is unknown or missing."""
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


def indexed(device: torch.device) -> torch.device:
    """Return `device`, with the index of the calling thread's current GPU if it is a GPU without an index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the calling thread's current device inside the `with` block; do nothing for a CPU.

    Triton launches on the current device, and pinned memory opens a CUDA context on it.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current_device() -> torch.device:
    """Return the calling thread's current GPU, or the CPU if CUDA is not initialised. New threads begin with GPU 0."""
    return indexed(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of a thread or process that works for only one engine."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def explain_out_of_memory(**arguments: object) -> Iterator[None]:
    """Turn a failed allocation in the `with` block into a ValueError with the names and values of `arguments`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        asked = ", ".join(f"{name} = {value}" for name, value in arguments.items())
        raise ValueError(f"{asked}; there is not enough memory: choose smaller values") from error


def free_main_memory() -> int:
    """Return the bytes of available memory (droppable system caches included) and free swap; all memory if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])


class DeviceCopies:
    """Copies of host arrays on a device, by name. An array is sent again only if its contents have changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[str, tuple[bytes, Tensor]] = {}

    def __call__(self, name: str, array: NDArray[Any]) -> Tensor:
        """Return `array` on the device; do not write to it. On a CPU the result shares the memory of `array`."""
        if self._device.type == "cpu":
            return upload(array, self._device)
        contents = array.tobytes()
        known, tensor = self._sent.get(name, (b"", None))
        if tensor is None or contents != known or tensor.shape != array.shape:
            tensor = upload(array, self._device)
            self._sent[name] = contents, tensor
        return tensor
