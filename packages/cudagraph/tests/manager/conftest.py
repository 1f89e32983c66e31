"""A small engine for tests of the manager: a producer with buffers at fixed addresses, and a body with a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import (
    BatchExecutionDescriptor,
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    Execution,
    GraphBackend,
    Phase,
    RecordedBackend,
    ReplayChecks,
    StagedBatch,
    get_backend,
)

MAX, WINDOW, DIM = 8, 4, 3


@dataclass(frozen=True)
class Bound:
    """A signature with one host scalar, an upper bound such as a builder's max_seq_len."""

    value: int

    def admits(self, runtime: Bound) -> str | None:
        return None if runtime.value <= self.value else f"reach is {runtime.value}, above {self.value}"


@dataclass
class State:
    """What the body reads.

    tokens, slots: (rows,) int64 token ids and cache slots. window: (rows, WINDOW) float32.
    schedule: (rows + 1,) int64. reach: columns of the window that are used, a host scalar.
    """

    tokens: Tensor
    slots: Tensor
    window: Tensor
    schedule: Tensor
    reach: int


class Toy:
    """A producer with a model. `schedule` is a buffer of a metadata builder, like FA3's scheduler metadata."""

    device = "cpu"

    def __init__(self) -> None:
        self.generation = 0
        self.buffers = {
            "tokens": torch.zeros(MAX, dtype=torch.int64, device=self.device),
            "slots": torch.zeros(MAX, dtype=torch.int64, device=self.device),
            "window": torch.zeros(MAX, WINDOW, device=self.device),
            "schedule": torch.zeros(MAX + 1, dtype=torch.int64, device=self.device),
        }
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(11, DIM, generator=generator).to(self.device)
        self.cache = torch.zeros(16, DIM, device=self.device)
        self.phases: list[tuple[int, Phase]] = []

    def addresses(self) -> Mapping[str, int]:
        return {name: buffer.data_ptr() for name, buffer in self.buffers.items()}

    def stage(self, key: BatchExecutionDescriptor, phase: Phase) -> StagedBatch[State]:
        self.phases.append((key.num_tokens, phase))
        return self.step(key, [1] * key.num_tokens, [0] * key.num_tokens, reach=WINDOW)

    def step(
        self, key: BatchExecutionDescriptor | None, tokens: Sequence[int], slots: Sequence[int], reach: int = 1
    ) -> StagedBatch[State]:
        """Stage rows. Padding rows have token 0 and slot 0, the null slot. Each window is filled with 1 + its row."""
        self.generation += 1
        num, padded = len(tokens), len(tokens) if key is None else key.num_tokens
        rows = {"tokens": torch.tensor(tokens), "slots": torch.tensor(slots)}
        for name, values in rows.items():
            self.buffers[name].zero_()
            self.buffers[name][:num] = values
        window = self.buffers["window"].zero_()
        window[:num, :reach] = torch.arange(1.0, num + 1, device=self.device)[:, None]
        schedule = self.buffers["schedule"].zero_()
        schedule[0] = padded
        schedule[1 : padded + 1] = torch.arange(padded, device=self.device)
        views = {name: self.buffers[name][:padded] for name in ("tokens", "slots", "window")}
        state = State(**views, schedule=schedule[: padded + 1], reach=reach)
        return StagedBatch(key, state, self.generation, Bound(reach))

    def fuzz(self, key: BatchExecutionDescriptor, seed: int) -> StagedBatch[State]:
        generator = torch.Generator().manual_seed(seed)
        self.cache.copy_(torch.randn(self.cache.shape, generator=generator))
        num = key.num_tokens
        tokens = torch.randint(11, (num,), generator=generator).tolist()
        slots = (torch.randperm(15, generator=generator)[:num] + 1).tolist()
        return self.step(key, tokens, slots, reach=int(torch.randint(1, WINDOW + 1, (), generator=generator)))

    def poison(self) -> None:
        for buffer in self.buffers.values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min // 2)

    def body(self, x: Execution[State]) -> dict[str, Tensor]:
        s = x.state
        hidden = self.weight[s.tokens] + 0.5 * self.cache[s.slots]
        hidden = x.eager(attend, hidden)
        self.cache.index_copy_(0, s.slots, hidden)
        return {"hidden": hidden, "batch": s.schedule[:1] + 0}


def attend(state: State, hidden: Tensor) -> Tensor:
    """Use the host scalar `reach`. A FULL graph has the captured value, a piecewise graph the value of the step."""
    return hidden * (1 + state.window[:, : state.reach].sum(1, keepdim=True))


def full(num: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(CudaGraphMode.FULL, num, num, 1, 1)


def pieces(num: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, num)


class Kit:
    """Helpers of the tests in this folder, for one backend."""

    State, Bound, MAX, WINDOW = State, Bound, MAX, WINDOW
    full, pieces, attend = staticmethod(full), staticmethod(pieces), staticmethod(attend)

    def __init__(self, toy: type[Toy], backend: Callable[[], GraphBackend]) -> None:
        self.Toy, self.Backend = toy, backend

    @staticmethod
    def dispatcher(sizes: Sequence[int] = (1, 2, 4, 8), mode: str = "FULL_DECODE_ONLY") -> CudagraphDispatcher:
        return CudagraphDispatcher.make(CudaGraphMode[mode], sizes)

    def manager(self, mode: str = "FULL_DECODE_ONLY", **options: ReplayChecks) -> CudaGraphManager:
        return CudaGraphManager(self.dispatcher(mode=mode), self.Backend(), **options)


@pytest.fixture(scope="session")
def cpu() -> Kit:
    """The recorded backend, for tests that need a CPU, such as a kernel that raises during a replay."""
    return Kit(Toy, RecordedBackend)


class CudaToy(Toy):
    device = "cuda"


CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")],
)


@pytest.fixture(scope="session", params=["recorded", CUDA])
def kit(request: pytest.FixtureRequest, cpu: Kit) -> Kit:
    """The recorded backend, and the CUDA backend if there is a GPU."""
    return cpu if request.param == "recorded" else Kit(CudaToy, partial(get_backend, "cuda", "cuda"))
