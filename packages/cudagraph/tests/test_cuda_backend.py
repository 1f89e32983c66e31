"""`CudaBackend` on a double of `torch.cuda`, and on a GPU if there is one."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import cuda
from bateleur.cudagraph.errors import CaptureError, HostSync

KEY = BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1)
PIECEWISE = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)


Handle = tuple[int, int]


class Allocator:
    """A double of the capture state of torch's device and host allocators.

    As `beginAllocateToPool`, `endAllocateToPool` and `releasePool` of c10/cuda/CUDACachingAllocator.h, and
    `begin_allocate_to_pool`, `end_allocate_to_pool` and `release_pool` of ATen/core/CachingHostAllocator.h.
    """

    def __init__(self) -> None:
        self.use_count: dict[Handle, int] = {}
        self.underway: dict[Handle, weakref.ref[Any]] = {}

    def begin(self, pool: Handle, graph: Any) -> None:
        if self.use_count.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT: the pool ended with its last graph")
        self.use_count[pool] = self.use_count.get(pool, 0) + 1
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already captured to mempool_id")
        self.underway[pool] = weakref.ref(graph)

    def end(self, pool: Handle) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently captured to mempool_id")
        del self.underway[pool]

    def release(self, pool: Handle) -> None:
        self.use_count[pool] -= 1
        assert self.use_count[pool] >= 0, "released more often than begun"

    def allocate(self) -> None:
        """Allocate: torch calls the filter function of each capture."""
        assert all(graph() is not None for graph in self.underway.values()), "the allocator uses a freed graph"


class Graph:
    """A double of `torch.cuda.CUDAGraph`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.pool: Any = None
        self.begun: tuple[Allocator, ...] = ()
        self.ended = False

    def capture_begin(self, pool: Handle, capture_error_mode: str) -> None:
        self.driver.log.append(("begin", pool, capture_error_mode, self.driver.current))
        self.pool, self.driver.drawing = pool, True
        for allocator in (self.driver.device, self.driver.host):
            allocator.begin(pool, self)
            self.begun = (*self.begun, allocator)
        if self.driver.refused or self.driver.capturing is not None:
            self.driver.refused = False
            raise RuntimeError("operation not permitted when stream is capturing")
        self.driver.capturing = self

    def capture_end(self) -> None:
        self.driver.log.append("end")
        assert self.driver.capturing is self
        self.driver.capturing = None
        if self.driver.invalid:
            self.driver.invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        for allocator in self.begun:
            allocator.end(self.pool)
        self.driver.drawing = False
        self.ended = True
        if self.driver.no_memory:
            self.driver.no_memory = False
            raise RuntimeError("CUDA error: out of memory")
        warnings.warn("The CUDA Graph is empty. This usually means...", UserWarning, stacklevel=1)

    def replay(self) -> None:
        self.driver.log.append("replay")

    def reset(self) -> None:
        self.driver.log.append("reset")
        self.clean()

    def clean(self) -> None:
        if self.begun and not self.ended and self.driver.resets:
            for allocator in self.begun:
                allocator.end(self.pool)
            self.driver.drawing, self.ended = False, True
        if self.ended:
            for allocator in self.begun:
                allocator.release(self.pool)
        self.begun, self.ended = (), False

    def __del__(self) -> None:
        self.clean()


class Driver:
    """A double of `torch.cuda` with the capture state of torch. It logs the calls.

    resets: whether `CUDAGraph.reset` cleans up after an invalid capture, as in torch 2.15. In torch 2.11 it does not.
    invalid: the next `capture_end` fails because the capture was invalidated.
    no_memory: the next `capture_end` fails when it instantiates the graph.
    refused: the next `capture_begin` fails.
    drawing: whether the random generator is in capture state.
    """

    def __init__(self, patch: pytest.MonkeyPatch, resets: bool) -> None:
        self.log: list[Any] = []
        self.resets = resets
        self.invalid = self.refused = self.no_memory = False
        self.free = 100
        self.current = "main"
        self.capturing: Any = None
        self.drawing = self.has_blas_handle = False
        self.device, self.host = Allocator(), Allocator()
        driver = self

        class Stream:
            name = "side"

            def __init__(self, device: Any) -> None:
                assert device == torch.device("cuda", 0)

            def wait_stream(self, other: Any) -> None:
                driver.log.append(f"{self.name} waits for {other.name}")

        class Main(Stream):
            name = "main"

        @contextmanager
        def stream(which: Stream) -> Iterator[None]:
            driver.current = which.name
            yield
            driver.current = "main"

        @contextmanager
        def device(_: Any) -> Iterator[None]:
            yield

        pools = iter(range(1, 100))
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "Stream": Stream,
            "current_stream": lambda device: Main(device),
            "stream": stream,
            "device": device,
            "CUDAGraph": partial(Graph, self),
            "graph_pool_handle": lambda: (0, next(pools)),
            "mem_get_info": lambda device: (driver.free, 1000),
            "is_current_stream_capturing": lambda: driver.capturing is not None,
            "current_blas_handle": driver.blas_handle,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.device.end(pool), raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.device.release(pool), raising=False)
        patch.setattr(cuda, "_INVALID", [])

    def blas_handle(self) -> int:
        """Return cuBLAS's handle, as a matrix product does. It cannot be created during a capture."""
        if self.capturing is not None and not self.has_blas_handle:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
        self.has_blas_handle = True
        return 1

    def step(self) -> None:
        """Do what eager work does between captures: allocate on device and host, and draw random numbers."""
        self.device.allocate()
        self.host.allocate()
        if self.drawing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


@pytest.fixture(params=[False, True], ids=["torch-2.11", "torch-2.15"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch, request.param)


def test_a_capture_is_on_a_side_stream_with_one_pool(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")
    bodies = []
    for _ in range(2):
        with backend.session():
            bodies.append(backend.capture(lambda _: 7, KEY, None))
        assert driver.log == [
            "side waits for main",
            ("begin", (0, 1), "thread_local", "side"),
            "end",
            "main waits for side",
        ]
        driver.log.clear()
    assert bodies[0].replay(None) == 7
    assert driver.log == ["replay"]


def test_the_first_matrix_product_may_be_in_a_capture(driver: Driver) -> None:
    """An H200 refused it."""
    backend = cuda.CudaBackend("cuda")
    with backend.session():
        assert backend.capture(lambda _: driver.blas_handle(), KEY, None).replay(None) == 1


def test_a_pool_ends_with_its_last_graph(driver: Driver) -> None:
    """The allocator refuses the handle of a pool after its last graph was freed."""
    backend = cuda.CudaBackend("cuda:0")

    def capture() -> Any:
        with backend.session():
            captured = backend.capture(lambda _: None, KEY, None)
        pools.append(next(entry[1] for entry in driver.log[::-1] if entry[0] == "begin"))
        return captured

    pools: list[Any] = []
    first, second = capture(), capture()
    first.release()
    third = capture()
    second.release()
    third.release()
    fourth = capture()
    del fourth  # dropped, not released
    capture()
    assert [pool[1] for pool in pools] == [1, 1, 1, 2, 3]
    assert driver.log.count("reset") == 3


def test_pieces_and_memory(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")
    x = torch.ones(2)

    def body(execution: Any) -> Tensor:
        y = execution.eager(lambda state, t: t + state, x)
        driver.free -= 50
        driver.log.append("between")
        return y

    with backend.session():
        captured = backend.capture(body, PIECEWISE, 1)
    assert [e if isinstance(e, str) else e[0] for e in driver.log[1:-1]] == ["begin", "end", "begin", "between", "end"]
    assert (captured.num_graphs, captured.nbytes) == (2, 50)
    assert captured.replay(5).tolist() == [6, 6]


def test_stream_and_pool_can_be_used_after_a_failed_body(driver: Driver) -> None:
    """The capture ends, the graph is dropped, and the error of the body is raised."""
    backend = cuda.CudaBackend("cuda")

    def body(_: Any) -> None:
        raise KeyError("weights")

    with backend.session():
        kept = backend.capture(lambda _: 1, KEY, None)
        driver.log.clear()
        with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*KeyError.*weights") as caught:
            backend.capture(body, KEY, None)
        assert isinstance(caught.value.__cause__, KeyError)
        assert driver.log[1:] == ["end", "reset"]
        driver.step()
        assert driver.current == "side"
        assert backend.capture(lambda _: 2, KEY, None).replay(None) == 2
    assert {entry[1] for entry in driver.log if entry[0] == "begin"} == {(0, 1)}, "the pool is kept"
    assert kept.replay(None) == 1
    assert driver.log[-1] == "replay"
    assert "main waits for side" in driver.log


INVALID: dict[str, Any] = {
    "in the body": lambda driver: setattr(driver, "invalid", True) or {}["weights"],
    "unnoticed": lambda driver: setattr(driver, "invalid", True),
    "no memory for the graph": lambda driver: setattr(driver, "no_memory", True),
}


@pytest.mark.parametrize("how", INVALID)
@pytest.mark.parametrize("mode", [KEY, PIECEWISE], ids=["full", "piecewise"])
def test_an_invalid_capture_affects_only_its_key(driver: Driver, how: str, mode: Any) -> None:
    """Its pool gets no other capture, earlier graphs keep the pool, and eager work between captures is not affected."""
    backend = cuda.CudaBackend("cuda")

    def fails(execution: Any) -> None:
        execution.eager(lambda state, x: x, torch.ones(1))
        INVALID[how](driver)

    def ok(_: Any) -> int:
        return 2

    with backend.session():
        first = backend.capture(ok, KEY, None)
        for _ in range(2):
            with pytest.raises(CaptureError):
                backend.capture(fails, mode, None)
            gc.collect()
            driver.step()
        later = [backend.capture(ok, KEY, None) for _ in range(2)]
        driver.step()
    begun = [entry[1] for entry in driver.log if entry[0] == "begin"]
    assert begun[-1] == begun[-2] != begun[0], "later keys share a new pool"
    assert [each.replay(None) for each in (first, *later)] == [2, 2, 2]
    first.release()
    for each in later:
        each.release()
    assert {**driver.device.use_count, begun[0]: 0} == dict.fromkeys(driver.device.use_count, 0)
    assert not driver.device.underway


def test_a_capture_that_does_not_begin_affects_only_its_key(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")
    with backend.session():
        first = backend.capture(lambda _: 1, KEY, None)
        driver.refused = True
        with pytest.raises(CaptureError, match="not permitted"):
            backend.capture(lambda _: 2, KEY, None)
        gc.collect()
        driver.step()
        assert backend.capture(lambda _: 3, KEY, None).replay(None) == 3
    assert first.replay(None) == 1
    assert not driver.device.underway


def test_a_pool_after_an_abandoned_one_ends_with_its_own_last_graph(driver: Driver) -> None:
    """Live graphs of the abandoned pool do not keep the new pool alive."""
    backend = cuda.CudaBackend("cuda")
    with backend.session():
        kept = backend.capture(lambda _: 1, KEY, None)
        driver.invalid = True
        with pytest.raises(CaptureError):
            backend.capture(lambda _: 2, KEY, None)
        backend.capture(lambda _: 3, KEY, None).release()
        assert backend.capture(lambda _: 4, KEY, None).replay(None) == 4
    assert kept.replay(None) == 1


def test_an_invalid_capture_without_another_error_is_an_error(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")

    def body(_: Any) -> None:
        driver.invalid = True

    with backend.session(), pytest.raises(CaptureError, match="previous error during capture"):
        backend.capture(body, KEY, None)


def test_a_capture_within_a_capture_is_refused_and_does_not_change_the_outer_one(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")

    def body(_: Any) -> int:
        with suppress(CaptureError):
            backend.capture(lambda _: 1, KEY, None)
        return 2

    with backend.session():
        kept = backend.capture(lambda _: 1, KEY, None)
        assert backend.capture(body, KEY, None).replay(None) == 2
        assert backend.capture(lambda _: 3, KEY, None).replay(None) == 3
    assert kept.replay(None) == 1
    assert {entry[1] for entry in driver.log if entry[0] == "begin"} == {(0, 1)}


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_collection_is_restored(driver: Driver, enabled: bool) -> None:
    """A collection can invalidate a capture, so it is off. It must be on again after a body that raises."""
    backend = cuda.CudaBackend("cuda")
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        for fails in (False, True):
            with suppress(ZeroDivisionError), backend.session():
                assert not gc.isenabled()
                with pytest.raises(CaptureError, match="missing"):
                    backend.capture(lambda _: {}["missing"], KEY, None)
                assert not gc.isenabled()
                _ = 1 / (not fails)
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_session_does_not_call_the_garbage_collector(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many objects a collection takes half a second, and every capture has a session."""
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collects"))
    with cuda.CudaBackend("cuda").session():
        assert not gc.isenabled()


def test_a_capture_needs_a_session(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")
    with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*session"):
        backend.capture(lambda _: 1, KEY, None)
    with backend.session():
        backend.capture(lambda _: 1, KEY, None)
    with pytest.raises(CaptureError, match="session"):
        backend.capture(lambda _: 1, KEY, None)


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize("track_operators", [False, True])
def test_gpu_the_backend_can_be_used_after_an_illegal_call(track_operators: bool) -> None:
    backend = cuda.CudaBackend("cuda", track_operators=track_operators)
    x = torch.ones(1 << 20, device="cuda")
    kept = None
    for body in (lambda _: (x * 2, torch.cuda.synchronize()), lambda _: (x * 2).sum().item(), lambda _: x.cpu()):
        with backend.session():
            with pytest.raises(CaptureError) as caught:
                backend.capture(body, KEY, None)
            (torch.rand(4, device="cuda"), torch.empty(4, pin_memory=True))  # as the warm-up of the next key may
            kept = kept or backend.capture(lambda _: x + 1, KEY, None)
            again = backend.capture(lambda _: (x + 2).sin() ** 2, KEY, None)
        assert caught.value.__cause__ is not None or isinstance(caught.value, HostSync)
        assert kept.replay(None).sum().item() == 2 << 20
        torch.testing.assert_close(again.replay(None), (x + 2).sin() ** 2)
    del kept, again
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


@gpu
@needs_gpu
def test_gpu_later_captures_reuse_the_pool() -> None:
    backend = cuda.CudaBackend("cuda")
    x = torch.ones(1 << 22, device="cuda")
    torch.cuda.empty_cache()
    with backend.session():
        bodies = [
            backend.capture(lambda execution: (execution.state * 2).sin(), KEY, x[:n]) for n in (1 << 22, 1 << 20)
        ]
    assert bodies[0].nbytes >= 1 << 24
    assert bodies[1].nbytes < bodies[0].nbytes
    for captured in bodies:
        captured.release()
    with backend.session():
        assert backend.capture(lambda _: x + 1, KEY, None).replay(None)[0].item() == 2


@gpu
@needs_gpu
def test_gpu_replays_are_ordered_with_the_current_stream() -> None:
    backend = cuda.CudaBackend("cuda")
    x = torch.zeros(1 << 22, device="cuda")
    with backend.session():
        captured = backend.capture(lambda _: x.sin().cos().sum(), KEY, None)
    for value in range(20):
        x.fill_(value)
        found = captured.replay(None).clone()
        torch.testing.assert_close(found, x.sin().cos().sum())
