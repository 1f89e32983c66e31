"""A trial engine measures the GPU memory of steps and graphs, and the caches get the rest."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, RecordedBackend
from bateleur.eagle import TargetNeeds
from bateleur.runner import LLM
from bateleur.runner.cache.plan import plan_caches
from bateleur.runner.cache.tensors import Caches
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.engine import memory_profile
from bateleur.runner.engine.memory_profile import DeviceMemory, needed_bytes, trial_setup
from bateleur.runner.engine.model_runner import ModelRunner
from bateleur.runner.engine.setup import EngineSetup

WEIGHTS, STEPS, GRAPH = 10_000_000, 300_000, 1000
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
VOCAB, ROWS = 97, 6


class Device(DeviceMemory):
    """A device that holds weights and the caches of all existing engines. A step uses `STEPS` bytes for a moment."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.caches: WeakSet[Caches] = WeakSet()
        self.plans: list[Any] = []
        self.lost = 0
        made = Caches.__init__

        def init(caches: Caches, *args: Any) -> None:
            made(caches, *args)
            self.caches.add(caches)
            self.plans.append(caches.plan)

        patch.setattr(Caches, "__init__", init)

    def settle(self) -> None:
        gc.collect()

    def used(self) -> int:
        return WEIGHTS + self.reserved()

    def reserved(self) -> int:
        return self.lost + sum(each.nbytes for caches in self.caches for each in caches.named().values())

    def peak(self) -> int:
        return self.used() + STEPS


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device on which each graph takes `GRAPH` bytes."""
    capture = RecordedBackend.capture

    def counted(backend: RecordedBackend, body: Any, key: BatchExecutionDescriptor, state: Any) -> Any:
        recording = capture(backend, body, key, state)
        recording.nbytes = GRAPH * recording.num_graphs
        return recording

    monkeypatch.setattr(RecordedBackend, "capture", counted)
    return Device(monkeypatch)


@pytest.fixture
def open_setup(tiny_hybrid: Path) -> Callable[..., EngineSetup]:
    def open_one(**settings: Any) -> EngineSetup:
        common = {
            "device": "cpu",
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_backend": "recorded",
            "cudagraph_capture_sizes": SIZES,
            "max_model_len": 64,
            "max_num_seqs": ROWS,
            "max_num_batched_tokens": 32,
            "kv_cache_memory_bytes": 4_000_000,
        }
        return EngineSetup.of(EngineConfig.of(model=tiny_hybrid, **(common | settings)), never)

    return open_one


def never(setup: EngineSetup) -> int:
    raise AssertionError("nothing is measured where somebody says how large caches are, or on a CPU")


@pytest.mark.slow
def test_steps_and_all_graphs_are_counted_and_caches_are_not(
    open_setup: Callable[..., EngineSetup], device: Device
) -> None:
    setup = open_setup()
    found = needed_bytes(setup, device)
    trial, plan = trial_setup(setup), device.plans[-1]
    assert (plan.num_blocks, plan.max_num_seqs) == (2, ROWS)
    assert plan.total_bytes < setup.cache_plan.total_bytes
    assert list(trial.graphs.capture_sizes or ()) == [1, 2, 3, 4, 16]
    # FULL keys have 1 to 6 rows; the trial has 1, 2, 3, 4 and 6. Each has three kinds of end graphs.
    pieces = 1 + len(setup.spec.recurrent) + len(setup.spec.attention)
    further = (1 + 3) * GRAPH + (10 - 5) * pieces * GRAPH
    logits = ROWS * VOCAB * 4
    assert found == STEPS + further + logits
    fewer = open_setup(kv_cache_memory_bytes=130_000)
    assert fewer.cache_plan.total_bytes < setup.cache_plan.total_bytes
    assert needed_bytes(fewer, device) == found
    assert not device.caches, "the trial is gone"


@pytest.mark.slow
def test_what_the_trial_leaves_behind_is_counted(
    open_setup: Callable[..., EngineSetup], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = open_setup(cudagraph_mode="NONE")
    clean = needed_bytes(setup, device)
    engine = memory_profile.Engine

    def leaking(small: EngineSetup) -> Any:
        device.lost += 5000
        return engine(small)

    monkeypatch.setattr(memory_profile, "Engine", leaking)
    assert needed_bytes(setup, device) == clean + 2 * 5000, "it takes as much again in the engine itself"


@pytest.mark.slow
def test_a_step_that_does_not_fit_names_what_to_choose(
    open_setup: Callable[..., EngineSetup], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = open_setup(cudagraph_mode="NONE")

    def full(runner: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(ModelRunner, "run_largest", full)
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens=32, max_num_seqs=6: a step does not fit .*2 GiB"):
        needed_bytes(setup, device)
    gc.collect()
    assert not device.caches


@pytest.mark.slow
def test_the_largest_steps_are_run(
    open_setup: Callable[..., EngineSetup], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows share the tokens if one request may not have so many."""
    setup = open_setup(max_model_len=12, cudagraph_mode="NONE")
    seen = set()
    run = ModelRunner.run_largest

    def watched(runner: Any) -> None:
        forward = runner.graphs.run
        monkeypatch.setattr(
            runner.graphs, "run", lambda staged: (seen.add(staged.state.batch.num_tokens), forward(staged))[1]
        )
        run(runner)

    monkeypatch.setattr(ModelRunner, "run_largest", watched)
    needed_bytes(setup, device)
    assert seen == {30, ROWS}, "three prompts of 10 tokens, then a decode of every row"


class Own:
    """A custom drafter."""

    num_speculative_tokens, needs = 2, TargetNeeds(taps=(1,))

    def admit(self, row: int, token_ids: list[int]) -> None:
        raise AssertionError("it hears of the trial")

    propose = admit


@pytest.mark.slow
def test_a_drafter_of_the_users_own_does_not_take_part(open_setup: Callable[..., EngineSetup], device: Device) -> None:
    setup = open_setup(drafter=Own(), num_speculative_tokens=2)
    assert not isinstance(trial_setup(setup).drafter, Own)
    assert needed_bytes(setup, device) > STEPS


def test_a_trial_offloads_nothing(open_setup: Callable[..., EngineSetup], tmp_path: Path) -> None:
    setup = open_setup(enable_prefix_caching=True, kv_offload_bytes=1 << 20, kv_offload_path=tmp_path)
    assert setup.host is not None
    trial = trial_setup(setup)
    assert (trial.host, trial.disk) == (None, None)
    assert replace(trial, host=setup.host, disk=setup.disk).limits == setup.limits


def test_caches_get_what_is_measured_to_be_left(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake GPU of 24 GB. A first plan decides how many rows are measured, and the second has no more."""
    total, free, needed = 24 << 30, 20 << 30, 3 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    plans: list[tuple[int, int]] = []
    measured: list[EngineSetup] = []

    def planned(spec: Any, dtype: Any, limits: Any, options: Any, budget: int, **choices: Any) -> Any:
        plans.append((limits.max_num_seqs, budget))
        made = plan_caches(spec, dtype, limits, options, budget, **choices)
        return replace(made, max_num_seqs=min(made.max_num_seqs, 5))

    def measure(setup: EngineSetup) -> int:
        measured.append(setup)
        assert needed_bytes(setup) >= 0, "a trial runs on such a device"
        return needed

    monkeypatch.setattr("bateleur.runner.engine.setup.plan_caches", planned)
    monkeypatch.setattr("bateleur.runner.llm.needed_bytes", measure)
    llm: LLM = cuda.make(kv_cache_memory_bytes=None, max_num_seqs=None, max_num_batched_tokens=None)
    (first,) = measured
    (rows, about), again = plans
    assert again == (5, int(free - 0.1 * total) - needed)
    assert rows > 5
    assert first.limits.max_num_seqs == llm.limits.max_num_seqs == 5
    assert 0 < int(free - 0.1 * total) - about < needed
