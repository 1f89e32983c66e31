"""Where a model runs, in which dtype, sending it what the host decided, and fetching what came of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.metadata import pinned as pinned
from bateleur.metadata import upload as upload

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


def indexed(device: torch.device) -> torch.device:
    """`device`, with the index of the calling thread's current GPU if it is a GPU without an index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the calling thread's current device inside the `with` block; do nothing for a CPU.

    Triton launches on the current device, whatever device its arguments are on, and pinned memory opens a CUDA context
    on it. On exit the previous device is current again.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def of_this_thread() -> torch.device:
    """The calling thread's current GPU, or the CPU if CUDA is not initialised. New threads begin with GPU 0."""
    return indexed(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of a thread or process that works for one engine only."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


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


def free_main_memory() -> int:
    """Bytes that could be had: with what the system would give back, and swap. All there is, where it doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"])


class Kept:
    """Arrays on a device, which are sent again only where they differ from what was sent last under their name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[str, tuple[bytes, Tensor]] = {}

    def __call__(self, name: str, array: NDArray[Any]) -> Tensor:
        """`array` on the device, for whoever does not write to it; on a CPU it is the array itself."""
        if self._device.type == "cpu":
            return upload(array, self._device)
        contents = array.tobytes()
        known, tensor = self._sent.get(name, (b"", None))
        if tensor is None or contents != known or tensor.shape != array.shape:
            tensor = upload(array, self._device)
            self._sent[name] = contents, tensor
        return tensor


class Fetch:
    """Tensors on their way to the host.

    The copies stand behind what the device was given so far, and `wait` is for these alone: what is queued after the
    making of a `Fetch` goes on while the host works on what it got. The tensors must not change before that.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All on one device. On CPU nothing is copied."""
        self._done: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._on_host = list(tensors)
            return
        self._on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for host, each in zip(self._on_host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[NDArray[Any]]:
        """The contents, in the order given."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._on_host]
