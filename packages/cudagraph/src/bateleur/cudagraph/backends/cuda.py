"""`CudaBackend`: captures `torch.cuda.CUDAGraph` objects, with one memory pool and one stream per backend object."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import UntypedStorage

from bateleur.cudagraph._capture_tracker import CaptureTracker, PoolViews
from bateleur.cudagraph.backends.base import CapturedBody, GraphBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.capture import BodyCapture
from bateleur.cudagraph.errors import CaptureError
from bateleur.cudagraph.execution import Body, S, T

_INVALID: list[torch.cuda.CUDAGraph] = []
"""Graphs of invalid captures. They live as long as the process, see `CudaGraphPool.abandon`."""


class CudaGraphPool:
    """A private memory pool of torch's allocators that several captures share.

    Attributes:
        handle: torch's handle of the pool. torch refuses it after the last graph was freed.
        graphs: graphs that were captured into the pool and still exist.
        abandoned: whether a capture into the pool was invalid, so that no other capture may use the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.abandoned = False
        self._device = device

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a capture that the driver refused to begin or to end, and mark the pool as abandoned.

        Graphs that were captured into the pool before can still be replayed. Later captures need a new pool.

        The capture has put the allocators of device and pinned memory and the default random generator into capture
        state. In torch 2.15, `CUDAGraph.reset` ends this state. In torch 2.11 it does not, with three effects:

        * The device allocator defers frees and can't return cached memory. `torch._C._cuda_endAllocateToPool` and
          `torch._C._cuda_releasePool` end this.
        * The allocator of pinned memory refuses another capture into the pool, so the pool is abandoned. At each
          allocation it calls a function with the address of the graph object, so the object is never freed.
        * The generator refuses to draw outside of a capture. Capturing an empty graph resets it.
        """
        self.abandoned = True
        _INVALID.append(graph)
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError):  # raised if reset() has ended the capture in the allocator
            torch._C._cuda_endAllocateToPool(self._device.index, self.handle)
            torch._C._cuda_releasePool(self._device.index, self.handle)
        empty = torch.cuda.CUDAGraph()
        try:
            begin_capture(empty, torch.cuda.graph_pool_handle())
            end_capture(empty)
        except RuntimeError:  # the device is lost, and the next capture raises the same error
            _INVALID.append(empty)


def begin_capture(graph: torch.cuda.CUDAGraph, handle: Any) -> None:
    """Begin a capture of `graph` on the current stream, into the memory pool of `handle`. Other threads may call the
    driver meanwhile.
    """
    graph.capture_begin(pool=handle, capture_error_mode="thread_local")


def end_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture of `graph`. A capture without operators is no error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


class CudaBackend(GraphBackend):
    """Captures CUDA graphs on `device`.

    Args:
        track_operators: whether to see every operator of a capture, to find external memory and to name a host sync. It
            costs time during capture only. Use False for functions that `torch.compile` compiled, because they do not
            run compiled under a dispatch mode. Then `externals` is empty, and `check_externals` and `poison` do
            nothing. Outputs and arguments of eager parts keep their memory allocated, because the backend cannot tell
            it from external memory. Kernels that are launched without a torch operator are never seen.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str = "cuda", *, track_operators: bool = True) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"name='cuda' needs a CUDA device, got device={device}; use name='recorded' on CPU")
        if not torch.cuda.is_available():
            raise ValueError(f"device={device}: this machine or this build of torch has no CUDA")
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._track_operators = track_operators
        self._stream = torch.cuda.Stream(self._device)
        self._pool_views: PoolViews = weakref.WeakSet()
        self._pool: CudaGraphPool | None = None
        self._in_session = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Switch to a side stream, ordered with the current stream, and switch garbage collection off.

        During a capture, the driver refuses to free a Triton module or a graph, which garbage collection might do. It
        also refuses to create a cuBLAS handle, so the handle of this thread is created before.
        """
        with ExitStack() as stack:
            if gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            stack.enter_context(torch.cuda.device(self._device))
            torch.cuda.current_blas_handle()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            stack.callback(current.wait_stream, self._stream)
            self._in_session = True
            stack.callback(setattr, self, "_in_session", False)
            stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Capture one call of `body` with `state`. Call it within `session()`, else it raises `CaptureError`."""
        if not self._in_session:
            raise CaptureError(f"{key}: capture() must be called within session()")
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{key}: capture() was called within another capture; end that one first")
        if self._pool is None or self._pool.abandoned or not self._pool.graphs:
            self._pool = CudaGraphPool(self._device)
        before, _ = torch.cuda.mem_get_info(self._device)
        tracker = _CudaCaptureTracker(self._pool, key, self._device, self._pool_views)
        modes = (tracker,) if self._track_operators else ()
        captured = BodyCapture(tracker, key, state).capture(body, *modes)
        captured.nbytes = max(before - torch.cuda.mem_get_info(self._device)[0], 0)
        return captured


class _CudaCaptureTracker(CaptureTracker):
    """Captures each piece (the operators of one graph) as a CUDA graph, on the current stream."""

    def __init__(
        self, pool: CudaGraphPool, key: BatchExecutionDescriptor, device: torch.device, pool_views: PoolViews
    ) -> None:
        super().__init__(key, device, pool_views)
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            begin_capture(graph, self._pool.handle)
        except RuntimeError:
            self._pool.abandon(graph)
            raise
        self._graph = graph
        self.open = True

    def end(self) -> torch.cuda.CUDAGraph:
        self.check()
        graph = self._close()
        assert graph is not None, "begin() was called"
        self._pool.graphs.add(graph)
        return graph

    def abort(self) -> None:
        with suppress(RuntimeError):  # the capture is invalid, and the caller raises the cause
            graph = self._close()
            if graph is not None:
                graph.reset()

    def _allocate(self, nbytes: int, device: torch.device) -> UntypedStorage:
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
