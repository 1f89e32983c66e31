"""CUDA graphs: `torch.cuda.CUDAGraph`, one memory pool and one stream for all recordings of a backend."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import UntypedStorage

from bateleur.cudagraph._watch import Tape
from bateleur.cudagraph.backends.base import GraphBackend, Recording
from bateleur.cudagraph.descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.errors import CaptureError
from bateleur.cudagraph.execution import Body, S, T
from bateleur.cudagraph.segments import Segments


class CudaBackend(GraphBackend):
    """Captures CUDA graphs on `device`.

    Args:
        device: a CUDA device.
        audit: watch the operators of a capture, to know whose memory a graph uses and to name a host sync. It costs
            time during capture only, but torch.compile does not run compiled code under it: False for such bodies;
            then `externals` is empty, `check_externals` and `poison` do nothing, and outputs and arguments of eager
            parts keep their memory, because nothing tells it from memory of others. Kernels that are launched without
            an operator are not seen.

    Raises:
        ValueError: `device` is no CUDA device, or there is none.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str = "cuda", *, audit: bool = True) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"name='cuda' captures CUDA graphs; device={device} must be a CUDA device")
        if not torch.cuda.is_available():
            raise ValueError(f"device={device}: this machine or this build of torch has no CUDA")
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._audit = audit
        self._stream = torch.cuda.Stream(self._device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._lent: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._pool: Any = None
        self._in_session = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """A side stream that waits for the current one and is waited for, and no garbage collection.

        A collection during capture may free what the driver must not be asked to free then (a Triton module, a graph).
        """
        with torch.cuda.device(self._device), _no_collection():
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            self._in_session = True
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                self._in_session = False
                current.wait_stream(self._stream)

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> Recording[S, T]:
        """Capture one call of `body`, within a `session`; `CaptureError` without one."""
        if not self._in_session:
            raise CaptureError(f"{key}: a CUDA graph is captured within session()")
        if not self._graphs:  # a pool ends with its last graph, and its handle can't be used again
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved(self._device)
        tape = CudaTape(key, self._device, self._lent, self._pool, self._graphs)
        watchers = (tape,) if self._audit else ()
        recording = Segments(tape, key, state).capture(body, *watchers)
        recording.nbytes = max(torch.cuda.memory_reserved(self._device) - before, 0)
        return recording


class CudaTape(Tape):
    """Captures pieces on the current stream."""

    def __init__(
        self,
        key: BatchExecutionDescriptor,
        device: torch.device,
        lent: weakref.WeakSet[UntypedStorage],
        pool: Any,
        graphs: weakref.WeakSet[torch.cuda.CUDAGraph],
    ) -> None:
        super().__init__(key, device, lent)
        self._pool = pool
        self._graphs = graphs
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Open a piece."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may go on using the driver
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph
        self.open = True

    def end(self) -> torch.cuda.CUDAGraph:
        """Close the piece."""
        self.check()
        graph = self._close()
        assert graph is not None, "begin() was called"
        self._graphs.add(graph)
        return graph

    def abort(self) -> None:
        """End the capture, so that stream and pool are usable again, and drop the graph."""
        with suppress(RuntimeError):  # the capture is invalid; the error that got us here says why
            graph = self._close()
            if graph is not None:
                graph.reset()

    def _take(self, nbytes: int, device: torch.device) -> UntypedStorage:
        return UntypedStorage(nbytes, device=device)

    def _close(self) -> torch.cuda.CUDAGraph | None:
        self.open = False
        graph, self._graph = self._graph, None
        if graph is not None:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    graph.capture_end()
            except RuntimeError:
                drop_pool_of_failed_capture(self._device, self._pool)
                graph.reset()
                raise
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave everything that exists alone, garbage too: collecting it would take long for many objects. Puts back what
    was before, whatever happens."""
    enabled = gc.isenabled()
    freeze = gc.get_freeze_count() == 0  # unfreeze() would also free what somebody else froze
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


def drop_pool_of_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the CUDA allocator that a capture into `pool` is over.

    `CUDAGraph.capture_end` does that last, and not at all where the driver says that the capture was invalid; the
    allocator would then put off frees for good.
    """
    with suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
