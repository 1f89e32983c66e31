"""Fixtures: the tests of captured graphs run on each backend that captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import get_backend
from bateleur.cudagraph.backends.base import CapturedBody

KEYS = {
    "FULL": BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1),
    "PIECEWISE": BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4),
}


class Graphs:
    """A backend, with short forms of capture and tensor creation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
        self.backend = get_backend(name, self.device)

    def capture(self, body: Callable[[Any], Any], state: Any = None, mode: str = "FULL") -> CapturedBody[Any, Any]:
        """Capture `body(execution)`."""
        with self.backend.session():
            return self.backend.capture(body, KEYS[mode], state)

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on the device of the backend."""
        return torch.tensor(data, dtype=dtype, device=self.device)


CUDA = pytest.param(
    "cuda",
    marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")),
)


@pytest.fixture(params=["recorded", CUDA])
def graphs(request: pytest.FixtureRequest) -> Graphs:
    """The recorded and the CUDA backend. CUDA needs a GPU."""
    return Graphs(request.param)


@pytest.fixture
def recorded() -> Graphs:
    """The recorded backend, for behaviour that other backends do not have."""
    return Graphs("recorded")
