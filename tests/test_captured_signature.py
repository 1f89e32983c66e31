"""T-E1: host scalars of attention metadata are frozen in a graph, and decide whether a batch may replay it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import (
    CudagraphDispatcher,
    CudaGraphManager,
    CudaGraphMode,
    Execution,
    Phase,
    RecordedBackend,
    SignatureMismatch,
    StagedBatch,
)
from bateleur.metadata import Role, Signature


@dataclass
class State:
    lens: Tensor
    max_seq_len: int
    stride: int
    skip_context: bool


class Producer:
    """Stages lengths at a fixed address, and one scalar of each role."""

    generation = 0

    def __init__(self) -> None:
        self.lens = torch.zeros(4, dtype=torch.int64)

    def addresses(self) -> dict[str, int]:
        return {"lens": self.lens.data_ptr()}

    def stage(self, key, phase, max_seq_len=16, stride=3, skip_context=False) -> StagedBatch[State]:
        self.generation += 1
        self.lens.fill_(min(max_seq_len, 5))
        state = State(self.lens[: key.num_tokens], max_seq_len, stride, skip_context)
        scalars = (
            ("max_seq_len", Role.BOUND, max_seq_len),
            ("stride", Role.LAYOUT, stride),
            ("skip_context", Role.CONTROL, skip_context),
        )
        return StagedBatch(key, state, self.generation, Signature.join(attention=Signature(scalars)))


def body(x: Execution[State]) -> Tensor:
    lens = x.state.lens
    positions = torch.arange(x.state.max_seq_len)
    rows = (positions < lens[:, None]).sum(1) * x.state.stride
    return rows if x.state.skip_context else rows + 1


@pytest.fixture(scope="module")
def ready():
    producer = Producer()
    plan = CudagraphDispatcher.make(CudaGraphMode.FULL_DECODE_ONLY, [2, 4])
    manager = CudaGraphManager(plan, RecordedBackend())
    manager.capture(producer, body)
    return producer, manager


@pytest.mark.parametrize("max_seq_len", [2, 5, 16])
def test_e1_a_bound_may_be_lower_than_captured(ready, max_seq_len: int) -> None:
    producer, manager = ready
    for key in manager.dispatcher.keys:
        staged = producer.stage(key, Phase.RUN, max_seq_len)
        assert torch.equal(manager.replay(key, staged), body(Execution(None, staged.state)))


@pytest.mark.parametrize(
    ("scalars", "match"),
    [
        ({"max_seq_len": 17}, "attention.max_seq_len is 17, above the captured bound 16"),
        ({"stride": 2}, "attention.stride is 2, but layout 3 was captured"),
        ({"stride": 4}, "attention.stride is 4, but layout 3 was captured"),
        ({"skip_context": True}, "attention.skip_context is True, but control False was captured"),
    ],
)
def test_e1_the_offender_is_named(ready, scalars: dict[str, int], match: str) -> None:
    producer, manager = ready
    for key in manager.dispatcher.keys:
        with pytest.raises(SignatureMismatch, match=match) as error:
            manager.replay(key, producer.stage(key, Phase.RUN, **scalars))
        assert str(error.value).startswith(f"{key}: ")
