"""`GraphBackend`: the interface of all capture backends; `EagerBackend`, which captures nothing; and `CapturedBody`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol

from bateleur.cudagraph._memory import ExternalMemory, TrackedMemory
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import GraphError
from bateleur.cudagraph.execution import Body, Execution, S, T


class Graph(Protocol):
    """One captured graph, such as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Run the captured operators again."""

    def reset(self) -> None:
        """Free the graph."""


class CapturedBody(Generic[S, T]):
    """A captured body (the function to capture): one graph, or several graphs with eager parts between them.

    Its output tensors have fixed addresses and own no memory. Every replay of a graph of the same backend object may
    overwrite them. Arguments: ``run`` replays the body for a state and returns its output, ``memory`` has the storages
    that the graphs use.

    Attributes:
        num_graphs: number of captured graphs. 1 for a FULL key, 0 if nothing was captured (eager backend).
        nbytes: device memory that the capture allocated, the driver's memory for the graphs included.
    """

    def __init__(
        self, key: BatchExecutionDescriptor, run: Callable[[S], T], graphs: Sequence[Graph] = (),
        memory: TrackedMemory | None = None,
    ) -> None:  # fmt: skip
        self.num_graphs = len(graphs)
        self.nbytes = 0
        self._key, self._graphs, self._memory = key, graphs, memory or TrackedMemory()
        self._run: Callable[[S], T] | None = run
        self._poisoned = False

    @property
    def externals(self) -> tuple[ExternalMemory, ...]:
        """Memory that the graphs use and do not own. Empty if the backend cannot find it."""
        return self._memory.externals

    def replay(self, state: S) -> T:
        """Run the graphs, and return the output. Only the eager parts of a piecewise body read `state`.

        Raises `AddressMoved` or `DanglingExternal` if external memory moved or was freed, before anything ran;
        `GraphError` if the graphs were released or an eager part failed.
        """
        if self._run is None:
            raise GraphError(f"{self._key}: the graph was released; capture it again")
        self._poisoned = False
        return self._run(state)

    def check_externals(self) -> None:
        """Raise `DanglingExternal` or `AddressMoved` if external memory was freed or moved."""
        self._memory.check()

    def poison(self) -> None:
        """Overwrite the outputs and other owned memory with invalid values, as a replay of another graph might do."""
        if not self._poisoned:  # checks at level PARANOID poison all graphs in every step
            self._memory.poison()
            self._poisoned = True

    def release(self) -> None:
        """Free the graphs. Outputs of earlier replays become empty tensors, and `replay` raises."""
        for graph in self._graphs:
            graph.reset()
        self._memory.empty_views()
        self._run, self._graphs, self._memory = None, (), TrackedMemory()


class GraphBackend(Protocol):
    """Captures functions ("bodies") as graphs. All captures of one backend object share a memory pool."""

    name: str
    """`cuda`, `recorded` or `eager`."""

    def session(self) -> AbstractContextManager[None]:
        """Return the context for warm-ups and captures, such as a side CUDA stream. Its exit restores the stream."""
        return nullcontext()

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Capture one call of `body` with `state`: one graph for a FULL key, several pieces for a PIECEWISE key.

        Raises `HostSync` if the body read a device value on the host, and `CaptureError` if it raised or did something
        else that a graph cannot repeat. The backend can capture again after an error.
        """


class EagerBackend(GraphBackend):
    """Keeps the body (function) instead of capturing it. A replay calls the body, and returns new tensors."""

    name = "eager"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Keep `body` without running it. Each replay calls it."""
        return CapturedBody(key, lambda state: body(Execution(key, state)))
