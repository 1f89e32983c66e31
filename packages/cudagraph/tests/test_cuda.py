"""How the CUDA backend treats the process: against a double of `torch.cuda`, and on a GPU where there is one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import cuda
from bateleur.cudagraph.errors import CaptureError, HostSync

KEY = BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1)
PIECEWISE = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)


class Driver:
    """A double of `torch.cuda` that writes down what is asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.invalid = False
        self.reserved = 100
        self.current = "main"
        driver = self

        class Stream:
            name = "side"

            def __init__(self, device: Any) -> None:
                assert device == torch.device("cuda", 0)

            def wait_stream(self, other: Any) -> None:
                driver.log.append(f"{self.name} waits for {other.name}")

        class Main(Stream):
            name = "main"

        class CUDAGraph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                driver.log.append(("begin", pool, capture_error_mode, driver.current))

            def capture_end(self) -> None:
                driver.log.append("end")
                warnings.warn("The CUDA Graph is empty. This usually means...", UserWarning, stacklevel=1)
                if driver.invalid:
                    driver.invalid = False
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                driver.log.append("replay")

            def reset(self) -> None:
                driver.log.append("reset")

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
            "CUDAGraph": CUDAGraph,
            "graph_pool_handle": lambda: (0, next(pools)),
            "memory_reserved": lambda device: driver.reserved,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(
            cuda, "drop_pool_of_failed_capture", lambda device, pool: self.log.append(("drop", pool))
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_a_capture_is_on_a_side_stream_with_one_pool(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")
    recordings = []
    for _ in range(2):
        with backend.session():
            recordings.append(backend.capture(lambda _: 7, KEY, None))
        assert driver.log == [
            "side waits for main",
            ("begin", (0, 1), "thread_local", "side"),
            "end",
            "main waits for side",
        ]
        driver.log.clear()
    assert recordings[0].replay(None) == 7
    assert driver.log == ["replay"]


def test_a_pool_ends_with_its_last_graph(driver: Driver) -> None:
    """The handle of a pool whose graphs are gone is refused by the allocator."""
    backend = cuda.CudaBackend("cuda:0")

    def capture() -> Any:
        with backend.session():
            recording = backend.capture(lambda _: None, KEY, None)
        pools.append(next(entry[1] for entry in driver.log[::-1] if entry[0] == "begin"))
        return recording

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
        driver.reserved += 50
        driver.log.append("between")
        return y

    with backend.session():
        recording = backend.capture(body, PIECEWISE, 1)
    assert [e if isinstance(e, str) else e[0] for e in driver.log[1:-1]] == [
        "begin",
        "end",
        "begin",
        "between",
        "end",
    ]
    assert (recording.num_graphs, recording.nbytes) == (2, 50)
    assert recording.replay(5).tolist() == [6, 6]


@pytest.mark.parametrize("invalid", [False, True])
def test_k2_after_a_failed_capture_stream_and_pool_are_usable(driver: Driver, invalid: bool) -> None:
    """Class K, T-K2: the capture is ended, the graph dropped, and the error is the body's own."""
    backend = cuda.CudaBackend("cuda")

    def body(_: Any) -> None:
        driver.invalid = invalid
        raise KeyError("weights")

    with backend.session():
        kept = backend.capture(lambda _: 1, KEY, None)
        driver.log.clear()
        with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*KeyError.*weights") as caught:
            backend.capture(body, KEY, None)
        assert isinstance(caught.value.__cause__, KeyError)
        expected = ["end", ("drop", (0, 1)), "reset"] if invalid else ["end", "reset"]
        assert driver.log[1:] == expected
        assert driver.current == "side"
        assert backend.capture(lambda _: 2, KEY, None).replay(None) == 2
    assert kept.replay(None) == 1
    assert driver.log[-1] == "replay"
    assert "main waits for side" in driver.log


def test_an_invalid_capture_that_nobody_noticed_is_an_error(driver: Driver) -> None:
    backend = cuda.CudaBackend("cuda")

    def body(_: Any) -> None:
        driver.invalid = True

    with backend.session(), pytest.raises(CaptureError, match="previous error during capture"):
        backend.capture(body, KEY, None)
    assert ("drop", (0, 1)) in driver.log
    assert driver.log.count("end") == 1


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_k2_garbage_collection_is_put_back(driver: Driver, enabled: bool, frozen: bool) -> None:
    """Class K: a collection during capture can invalidate it; a body that raises must not leave it off."""
    backend = cuda.CudaBackend("cuda")
    was, others = gc.isenabled(), gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    try:
        if frozen:
            gc.freeze()
        if not enabled:
            gc.disable()
        count = gc.get_freeze_count()
        for fails in (False, True):
            with suppress(ZeroDivisionError), backend.session():
                assert not gc.isenabled()
                assert gc.get_freeze_count() > 1000
                with pytest.raises(CaptureError, match="missing"):
                    backend.capture(lambda _: {}["missing"], KEY, None)
                assert not gc.isenabled()
                _ = 1 / (not fails)
            assert gc.isenabled() == enabled
            assert (gc.get_freeze_count() > 1000) == frozen
            assert abs(gc.get_freeze_count() - count) < 100, "what somebody else froze stays frozen"
    finally:
        (gc.freeze if others else gc.unfreeze)()
        (gc.enable if was else gc.disable)()


def test_a_session_collects_no_garbage(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many objects that takes half a second, and every capture opens a session."""
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collects"))
    with cuda.CudaBackend("cuda").session():
        assert not gc.isenabled()


def test_captures_belong_in_a_session(driver: Driver) -> None:
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
@pytest.mark.parametrize("audit", [False, True])
def test_gpu_an_illegal_call_leaves_everything_usable(audit: bool) -> None:
    backend = cuda.CudaBackend("cuda", audit=audit)
    x = torch.ones(1 << 20, device="cuda")
    kept = None
    for body in (
        lambda _: (x * 2, torch.cuda.synchronize()),
        lambda _: (x * 2).sum().item(),
        lambda _: x.cpu(),
    ):
        with backend.session():
            with pytest.raises(CaptureError) as caught:
                backend.capture(body, KEY, None)
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
        recordings = [
            backend.capture(lambda execution: (execution.state * 2).sin(), KEY, x[:n])
            for n in (1 << 22, 1 << 20)
        ]
    assert recordings[0].nbytes >= 1 << 24
    assert recordings[1].nbytes < recordings[0].nbytes
    for recording in recordings:
        recording.release()
    with backend.session():
        assert backend.capture(lambda _: x + 1, KEY, None).replay(None)[0].item() == 2


@gpu
@needs_gpu
def test_gpu_replays_are_ordered_with_the_current_stream() -> None:
    backend = cuda.CudaBackend("cuda")
    x = torch.zeros(1 << 22, device="cuda")
    with backend.session():
        recording = backend.capture(lambda _: x.sin().cos().sum(), KEY, None)
    for value in range(20):
        x.fill_(value)
        found = recording.replay(None).clone()
        torch.testing.assert_close(found, x.sin().cos().sum())
