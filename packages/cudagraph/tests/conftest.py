"""Every property that graphs have on any backend is tested on each that captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import get_backend
from bateleur.cudagraph.backends.base import Recording

KEYS = {
    "FULL": BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1),
    "PIECEWISE": BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4),
}


class Graphs:
    """One backend, and how to capture with it in a line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
        self.backend = get_backend(name, self.device)

    def capture(
        self, body: Callable[[Any], Any], state: Any = None, mode: str = "FULL"
    ) -> Recording[Any, Any]:
        """Capture `body(execution)`."""
        with self.backend.session():
            return self.backend.capture(body, KEYS[mode], state)

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor where the bodies run."""
        return torch.tensor(data, dtype=dtype, device=self.device)


CUDA = pytest.param(
    "cuda",
    marks=(
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"),
    ),
)


@pytest.fixture(params=["recorded", CUDA])
def graphs(request: pytest.FixtureRequest) -> Graphs:
    """A backend that captures."""
    return Graphs(request.param)


@pytest.fixture
def recorded() -> Graphs:
    """The recorded backend, for what only it shows."""
    return Graphs("recorded")
