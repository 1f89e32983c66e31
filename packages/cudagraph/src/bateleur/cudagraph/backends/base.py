"""What every way of capturing has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol

from bateleur.cudagraph._memory import External, Memory
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, S, T


class Graph(Protocol):
    """A captured piece, as `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Do it again."""

    def reset(self) -> None:
        """Free it."""


class Recording(Generic[S, T]):
    """A captured body. Its output tensors keep their addresses and own no memory: replays of it, and of other
    recordings of the same backend, overwrite them.

    run: what a replay does. graphs: its captured pieces. memory: what they met.

    Attributes:
        num_graphs: captured pieces: 1 for a FULL graph, 0 where nothing was captured (eager backend).
        nbytes: memory that the capture took of the device: what the pool grew by, and what the driver keeps for graphs.
    """

    def __init__(
        self,
        key: BatchExecutionDescriptor,
        run: Callable[[S], T],
        graphs: Sequence[Graph] = (),
        memory: Memory | None = None,
    ) -> None:
        self.num_graphs = len(graphs)
        self.nbytes = 0
        self._key = key
        self._run: Callable[[S], T] | None = run
        self._graphs = graphs
        self._memory = memory or Memory()
        self._spoiled = False

    @property
    def externals(self) -> tuple[External, ...]:
        """Everything it reads or writes and does not own; empty where a backend can't tell."""
        return self._memory.externals

    def replay(self, state: S) -> T:
        """Run it. A FULL graph reads only what it baked; the eager parts of a piecewise one get `state`.

        Raises:
            AddressMoved, DanglingExternal: memory that it does not own is gone; nothing was run.
        """
        if self._run is None:
            raise GraphError(f"{self._key}: released")
        self._spoiled = False
        return self._run(state)

    def check_externals(self) -> None:
        """Raise `DanglingExternal` or `AddressMoved` if memory it does not own is not where it was."""
        self._memory.check()

    def poison(self) -> None:
        """Spoil its outputs and what else can be read of its memory, as a sibling might: NaN, or values out of range.

        Once after each replay is enough: checks do this to all recordings in every step.
        """
        if not self._spoiled:
            self._memory.poison()
            self._spoiled = True

    def release(self) -> None:
        """Free the graphs; a replay after that is refused, and outputs of earlier ones become empty tensors.

        A graph of another recording that reads them then finds that its external memory was freed.
        """
        for graph in self._graphs:
            graph.reset()
        self._memory.drop_views()
        self._run, self._graphs, self._memory = None, (), Memory()


class GraphBackend(Protocol):
    """Captures bodies. Recordings of one backend object share memory, so a replay may spoil another's outputs."""

    @property
    def name(self) -> str:
        """`cuda`, `recorded` or `eager`."""

    def session(self) -> AbstractContextManager[None]:
        """Around warm-ups and captures: whatever they need of the process, put back afterwards in any case."""
        return nullcontext()

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Capture one call of `body`, as one graph, or as pieces for a key of mode PIECEWISE.

        Raises:
            HostSync: the body read a device value on the host; it names the operator where the backend sees operators.
            CaptureError: the body did something else that no graph can hold, or raised; the backend stays usable.
        """
