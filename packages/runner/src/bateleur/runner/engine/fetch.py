"""Copies to the host that are queued now and waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


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
