"""`EagerBackend` and `get_backend`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode
from bateleur.cudagraph.backends import get_backend
from bateleur.cudagraph.backends.base import GraphBackend
from bateleur.cudagraph.errors import GraphError

KEY = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 4)


def test_a_replay_runs_the_body_for_the_state_it_is_given() -> None:
    backend: GraphBackend = get_backend("eager", "cpu")
    calls: list[Any] = []

    def body(execution: Any) -> torch.Tensor:
        calls.append((execution.key, execution.state))
        return execution.eager(lambda state, x: x * state, torch.ones(2)) + bool(torch.ones(1))

    with backend.session():
        captured = backend.capture(body, KEY, 2)
    assert calls == []
    first, second = captured.replay(3), captured.replay(5)
    assert calls == [(KEY, 3), (KEY, 5)]
    assert (first.tolist(), second.tolist()) == ([4, 4], [6, 6])
    captured.poison()
    captured.check_externals()
    assert second.tolist() == [6, 6]
    assert (captured.externals, captured.num_graphs, captured.nbytes) == ((), 0, 0)
    captured.release()
    with pytest.raises(GraphError, match="PIECEWISE 4 tokens"):
        captured.replay(3)


def test_errors_of_the_body_are_raised_unchanged() -> None:
    def body(_: Any) -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        get_backend("eager", "cpu").capture(body, KEY, None).replay(None)


@pytest.mark.parametrize(("name", "chosen"), [("auto", "eager"), ("eager", "eager"), ("recorded", "recorded")])
def test_a_backend_is_chosen_by_name(name: str, chosen: str) -> None:
    assert get_backend(name, "cpu").name == chosen
    assert get_backend(name, torch.device("cpu")).name == chosen
    assert get_backend("eager", "cuda").name == "eager"


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("cuda", "cpu", "name='cuda'.*device=cpu"),
        ("recorded", "cuda", "name='recorded'.*device=cuda"),
        ("graph", "cpu", "name='graph'.*auto, cuda, recorded or eager"),
    ],
)
def test_an_impossible_backend_is_refused(name: str, device: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        get_backend(name, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_cuda_without_cuda_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"device=cuda.*no CUDA"):
        get_backend(name, "cuda")
