"""An engine on `cuda:N` uses only that GPU in all of its threads, and leaves the caller's current device unchanged."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from triton.runtime.jit import JITFunction

from bateleur.mamba import gated_rms_norm
from bateleur.metadata._device_fields import gather_block_tables
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.distributed.connections import RankConnection
from bateleur.runner.distributed.process_group import ProcessGroup
from bateleur.runner.distributed.ranks import ALONE, Ranks
from bateleur.runner.engine.messages import AddRequests, RunStep
from bateleur.runner.engine_thread import EngineThread
from bateleur.runner.offload.host_memory import pinned_rows
from bateleur.runner.utils.device import indexed, use_device
from bateleur.runner.workers.follower import WorkerStart, run
from gpus import Gpus
from quick_fakes import QuickFakes

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes devices that this machine has"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]

ONE = torch.device("cuda:1")
PROMPTS = [[*range(10, 43)], [5], [*range(10, 43)]]
SETTINGS = [
    pytest.param({}, id="plain"),
    pytest.param({"draft": "auto", "num_speculative_tokens": 2}, id="drafts"),
    pytest.param({"enable_prefix_caching": True, "mamba_block_size": 16}, id="prefixes"),
    pytest.param({"cudagraph_capture_sizes": [2, 6, 24], "cudagraph_mode": "FULL_DECODE_ONLY"}, id="graphs"),
]


def params(count: int, **values: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=4, ignore_eos=True, seed=i, **values) for i in range(count)]


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a new thread, and return its result or raise its exception."""
    results: list[Any] = []

    def catch() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = Thread(target=catch)
    thread.start()
    thread.join()
    ((result, error),) = results
    if error is not None:
        raise error
    return result


@pytest.fixture
def second(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines on the second of several GPUs, while the first is current."""
    return harness.FakeCuda(monkeypatch, "cuda:1")


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_engine_works_on_its_device_and_leaves_the_callers_current(second: Any, settings: dict[str, Any]) -> None:
    llm = second.make(**settings)
    assert llm.device == llm.engine.device == ONE
    assert second.gpus.current() == 0
    done = second.run(llm, PROMPTS, params(3, temperature=0.8, top_p=0.9))
    assert len(done) == 3
    assert not second.faults, "\n".join(second.faults)
    assert second.gpus.contexts == {1}
    assert second.gpus.current() == 0


def test_an_engine_goes_from_thread_to_thread(second: Any) -> None:
    llm = in_thread(second.make)
    assert len(in_thread(lambda: second.run(llm, PROMPTS, params(3)))) == 3
    with second.watch:
        outputs = [output for output in llm.stream([PROMPTS[1]], params(1)) if second.gpus.current() == 0]
        assert outputs[-1].finished, "between two outputs the caller's device is current"
        llm.add_request([3, 4], params(1)[0], request_id="a")
        llm.abort("a")
        llm.close()
    assert not second.faults, "\n".join(second.faults)
    assert second.gpus.contexts == {1}
    assert second.gpus.current() == 0


def test_a_device_without_an_index_is_the_callers(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = harness.FakeCuda(monkeypatch, "cuda")
    with torch.cuda.device(1):
        llm = cuda.make()
    assert llm.device == ONE
    cuda.run(llm, PROMPTS, params(3))
    assert not cuda.faults, "\n".join(cuda.faults)
    assert cuda.gpus.contexts == {1}


def test_an_engine_in_a_thread_of_its_own_is_made_on_the_callers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with device 0 as current device."""
    gpus, seen = Gpus(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def make() -> LLM:
        seen.append(gpus.current())
        raise ValueError("none is wanted")

    with torch.cuda.device(1), pytest.raises(ValueError, match="none is wanted"):
        EngineThread(make, 1).open()
    assert seen == [1]


def test_a_caller_whose_call_raises_has_its_device_back(second: Any) -> None:
    llm = second.make()
    with second.watch, pytest.raises(ValueError, match="no such request"):
        llm.abort("nobody")
    assert second.gpus.current() == 0


def test_verifying_graphs_works_on_the_engines_device(second: Any) -> None:
    llm = second.make(cudagraph_capture_sizes=[2], cudagraph_mode="FULL_DECODE_ONLY")
    seen: list[int] = []
    llm.engine._verify_graphs = lambda fuzz: seen.append(second.gpus.current())
    llm.engine.verify_graphs()
    assert seen == [1]


def test_threads_that_read_and_write_prefixes_open_no_other_context(
    second: Any, sized: Callable[..., LLM], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"enable_prefix_caching": True, "mamba_block_size": 16, "kv_offload_bytes": 1 << 20}
    prompts = [[seed * 7 + i for i in range(40)] for seed in (1, 2, 3, 1)]
    first, other = (sized(second.make, 13, 1, kv_offload_path=str(tmp_path), **settings) for _ in range(2))
    second.run(first, prompts, params(4))
    with second.watch:
        first.add_request({"prompt_token_ids": [*range(40)]}, params(1)[0], request_id="a")
        for _ in range(3):
            first.step()
        first.abort("a")
        first.close()  # writes what that request leaves
    other.engine.offload.disk._next_scan = 0.0
    second.run(other, prompts, params(4))
    second.run(other, prompts, params(4))
    assert first.get_metrics().offload.written_bytes > 0
    assert other.get_metrics().offload.read_bytes > 0
    assert not second.faults, "\n".join(second.faults)
    assert second.gpus.contexts == {1}


def test_pinned_memory_is_given_up_on_the_device_it_was_pinned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, calls = Gpus(monkeypatch), []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: calls.append(gpus.current()) or 0,
        cudaHostUnregister=lambda _: calls.append(gpus.current()),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with use_device(ONE):
        memory = [pinned_rows((2, 64), ONE)]
    in_thread(memory.clear)
    assert calls == [1, 1]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_opens_a_context_on_its_own_device_alone(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Run `follower.run` in a thread, which starts with device 0 like a process. Its engine asks for "cuda"."""
    follower, groups = import_module("bateleur.runner.workers.follower"), []
    cuda = harness.FakeCuda(monkeypatch, "cuda")
    llm = cuda.make()
    settings = llm.config
    group = llm.prepare({"prompt_token_ids": PROMPTS[0]}, params(1)[0], request_id="a")
    cuda.gpus.contexts.clear()

    def made(store: Any, ranks: Ranks, device: torch.device, timeout: float) -> Any:
        groups.append((ranks.rank, device, cuda.gpus.current()))
        return SimpleNamespace(ranks=ALONE, limit=lambda seconds: None)  # it shares nothing with other ranks

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(follower, "ProcessGroup", made)
    monkeypatch.setattr(follower, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(follower.os, "_exit", leave)
    (orders, far_orders), (watch, far_watch) = Pipe(), Pipe()
    orders.send(WorkerStart(settings, rank, 3, 0, 1, 60.0))
    for order in (AddRequests((group,)), RunStep(0.0), RunStep(0.0)):
        orders.send(order)
    orders.close()

    def follow() -> None:
        with cuda.watch:
            run(RankConnection(far_orders, far_watch))

    with pytest.raises(SystemExit) as ended:
        in_thread(follow)
    assert ended.value.code == 0, watch.recv()
    assert groups == [(rank, torch.device("cuda", rank), rank)]
    assert not cuda.faults, "\n".join(cuda.faults)
    assert cuda.gpus.contexts == {rank}
    assert cuda.gpus.current() == 0


def test_a_group_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is created, aborted and destroyed on the rank's GPU, also from the thread that monitors other ranks."""
    gpus, seen = Gpus(monkeypatch), []
    c10d = MagicMock()
    c10d.ProcessGroupNCCL.side_effect = lambda *_: seen.append(gpus.current())
    c10d.ProcessGroup.return_value.abort.side_effect = lambda: seen.append(gpus.current())
    c10d.ProcessGroup.return_value.shutdown.side_effect = lambda: seen.append(gpus.current())
    monkeypatch.setattr("bateleur.runner.distributed.process_group._c10d", c10d)
    group = ProcessGroup(None, Ranks(1, 2, local=(1, 2)), ONE, 1.0)
    in_thread(group.abort)
    group.close()
    assert seen == [1, 1, 1]


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [Ranks(r, 2, local=(r, 2)).device(cuda) for r in (0, 1)] == [torch.device("cuda:0"), ONE]
    assert Ranks(1, 2).device(cpu) == ALONE.device(cpu) == cpu
    assert ALONE.device(ONE) == indexed(ONE) == ONE
    with use_device(ONE):
        assert ALONE.device(cuda) == indexed(cuda) == ONE


class TestPackagesAlone:
    """Operators and planners without an engine: Triton launches on the current device, which must be the tensors'
    device.
    """

    @pytest.fixture
    def launches(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Returns (kernel, current device) of every launch. Within the test, tensors may be fakes on several GPUs."""
        gpus, found = Gpus(monkeypatch), []
        monkeypatch.setattr(
            JITFunction, "run", lambda kernel, *_, **__: found.append((kernel.__name__, gpus.current()))
        )
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

        class OnCuda(QuickFakes):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "bateleur":
                    with self:
                        return func.redispatch(key, *args, **kwargs or {})
                return super().__torch_dispatch__(func, types, args, kwargs)

        with OnCuda():
            yield found
        assert gpus.current() == 0

    @pytest.mark.parametrize("index", [0, 1])
    def test_an_operator(self, launches: list[tuple[str, int]], index: int) -> None:
        x = torch.empty(3, 64, device=f"cuda:{index}")
        assert gated_rms_norm(x, x, x[0], 2, 1e-5).device == x.device
        assert launches == [("norm_kernel", index)]

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_form(self, launches: list[tuple[str, int]], index: int) -> None:
        """Staging, planners and draft passes select an implementation by a tensor, and are not operators."""
        table = torch.empty(4, 16, dtype=torch.int32, device=f"cuda:{index}")
        gather_block_tables(table, table, table[:, 0], table[:, 0], 16)
        assert launches == [("gather_block_tables_kernel", index)]
