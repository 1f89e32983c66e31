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

_INVALID: list[torch.cuda.CUDAGraph] = []
"""Graphs of invalid captures, for the life of the process, see `CapturePool.abandon`."""


class CapturePool:
    """A private memory pool of torch's allocators that several captures share.

    Attributes:
        handle: torch's handle of the pool.
        graphs: graphs that were captured into the pool and still exist. The pool ends with its last graph.
        abandoned: whether a capture into the pool was invalid, so that no other capture may use the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.abandoned = False
        self._device = device

    @property
    def takes_captures(self) -> bool:
        """Whether another capture may use the pool: torch refuses its handle after its last graph has gone."""
        return bool(self.graphs) and not self.abandoned

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a capture that the driver refused to begin or to end. Earlier graphs keep the pool.

        `CUDAGraph.capture_begin` puts three parts of torch into the state of a capture: the device allocator, the
        allocator of pinned host memory (torch >= 2.11), and the default random generator. If the driver reports an
        error, `capture_end` raises and leaves them in that state. `CUDAGraph.reset` ends it in torch 2.15 and not in
        torch 2.11, where:

        * The device allocator defers frees and can't return cached memory. It is told here.
        * The host allocator has no Python binding. It refuses another capture into the pool, hence `abandoned`. At each
          allocation it calls a function that has the address of the graph object, so the object must never be freed.
        * The generator refuses to draw outside of a capture, so the warm-up of the next key could not draw. A complete
          capture resets it, so an empty one is made here.
        """
        self.abandoned = True
        _INVALID.append(graph)
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError):  # reset() has ended the capture in the allocator
            torch._C._cuda_endAllocateToPool(self._device.index, self.handle)
            torch._C._cuda_releasePool(self._device.index, self.handle)
        empty = torch.cuda.CUDAGraph()
        try:
            begin_capture(empty, torch.cuda.graph_pool_handle())
            end_capture(empty)
        except RuntimeError:  # the device is lost; the next capture raises the same error
            _INVALID.append(empty)


def begin_capture(graph: torch.cuda.CUDAGraph, handle: Any) -> None:
    """Begin a capture on the current stream. Other threads may go on using the driver."""
    graph.capture_begin(pool=handle, capture_error_mode="thread_local")


def end_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture, which may be empty."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


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
        self._lent: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._pool: CapturePool | None = None
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
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{key}: a capture within a capture")
        if self._pool is None or not self._pool.takes_captures:
            self._pool = CapturePool(self._device)
        before, _ = torch.cuda.mem_get_info(self._device)
        tape = CudaTape(key, self._device, self._lent, self._pool)
        watchers = (tape,) if self._audit else ()
        recording = Segments(tape, key, state).capture(body, *watchers)
        recording.nbytes = max(before - torch.cuda.mem_get_info(self._device)[0], 0)
        return recording


class CudaTape(Tape):
    """Captures pieces on the current stream."""

    def __init__(
        self,
        key: BatchExecutionDescriptor,
        device: torch.device,
        lent: weakref.WeakSet[UntypedStorage],
        pool: CapturePool,
    ) -> None:
        super().__init__(key, device, lent)
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Open a piece."""
        graph = torch.cuda.CUDAGraph()
        try:
            begin_capture(graph, self._pool.handle)
        except RuntimeError:
            self._pool.abandon(graph)
            raise
        self._graph = graph
        self.open = True

    def end(self) -> torch.cuda.CUDAGraph:
        """Close the piece."""
        self.check()
        graph = self._close()
        assert graph is not None, "begin() was called"
        self._pool.graphs.add(graph)
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
                end_capture(graph)
            except RuntimeError:
                self._pool.abandon(graph)
                raise
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch automatic garbage collection off, and put it back as it was. A body must not collect by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
