"""Simulated GPUs: the current device of each thread, and the devices on which a CUDA context was opened.

`Gpus(patch)` replaces torch's device functions until the `pytest.MonkeyPatch` ends. Device 0 is current in a new
thread. As in CUDA 12, making a device current opens a context on it; `torch.cuda.device` restores a device without a
context without opening one.
"""

from __future__ import annotations

from threading import local
from types import SimpleNamespace

import pytest
import torch

from sm90 import MULTIPROCESSORS, SHARED_BYTES


class Gpus:
    """`contexts`: indices of the devices on which this process has a context."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int = 3) -> None:
        self._count, self._thread = count, local()
        self.contexts: set[int] = set()
        properties = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=9,
            minor=0,
            multi_processor_count=MULTIPROCESSORS,
            shared_memory_per_block_optin=SHARED_BYTES,
        )
        for name, function in {
            "current_device": self.current,
            "device_count": lambda: count,
            "get_device_capability": lambda device=None: (properties.major, properties.minor),
            "get_device_name": lambda device=None: properties.name,
            "get_device_properties": lambda device=None: properties,
            "set_device": lambda device: self._exchange(torch.device(device).index),
            "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._return_to,
        }.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.accelerator, "current_device_index", self.current)

    def current(self) -> int:
        """Index of the calling thread's current device."""
        return getattr(self._thread, "index", 0)

    def use(self, index: int) -> None:
        """Record work on a device, which opens a context."""
        assert 0 <= index < self._count, f"there is no cuda:{index}"
        self.contexts.add(index)

    def _exchange(self, index: int | None) -> int:
        assert index is not None
        self.use(index)
        return self._return_to(index)

    def _return_to(self, index: int) -> int:
        before, self._thread.index = self.current(), index
        return before
