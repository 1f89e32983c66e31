"""What every way of capturing has in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import Body

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class External:
    """Memory that a recording reads or writes and does not own.

    Attributes:
        address: of the storage's first byte.
        nbytes: of the storage.
        shape, dtype: of the tensor through which the recording met it first.
        mutated: whether the recording writes to it.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mutated: bool


class Recording(Protocol[S_contra, T_co]):
    """A captured body. Its output tensors keep their addresses and are overwritten by every replay."""

    @property
    def output(self) -> T_co:
        """What the body returned under capture: tensors of the graph's own memory, undefined until a replay."""
        ...

    @property
    def externals(self) -> tuple[External, ...]:
        """Everything it reads or writes and does not own; empty where a backend can't tell."""
        ...

    @property
    def num_graphs(self) -> int:
        """Captured pieces: 1 for a FULL graph, 0 where nothing was captured (eager backend)."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the capture took, in bytes."""
        ...

    def replay(self, state: S_contra) -> T_co:
        """Run it. A FULL graph reads only what it baked; the eager parts of a piecewise one get `state`."""
        ...

    def check_externals(self) -> None:
        """Raise `DanglingExternal` if memory it does not own has been freed since the capture."""
        ...

    def poison(self) -> None:
        """Spoil the outputs, as a sibling that shares its memory might: NaN, or values far out of range."""
        ...

    def release(self) -> None:
        """Free the graphs; a replay after that is refused."""
        ...


class GraphBackend(Protocol):
    """Captures bodies. Recordings of one backend object share memory, so a replay may spoil another's outputs."""

    @property
    def name(self) -> str:
        """`cuda`, `recorded` or `eager`."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Around warm-ups and captures: whatever they need of the process, put back afterwards in any case."""
        ...

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Capture one call of `body`, as one graph, or as pieces for a key of mode PIECEWISE.

        Raises:
            CaptureError: the body did what no graph can hold, or raised; the backend stays usable.
        """
        ...
