"""Piecewise graphs: functions that a body passes to `eager` run between captured pieces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, Execution, get_backend
from bateleur.cudagraph.errors import CaptureError, DanglingExternal, GraphError


@dataclass
class State:
    """A batch. The graphs read the buffer `x`; `scale` is a host scalar of one step."""

    x: Tensor
    scale: float


def attend(state: State, y: Tensor) -> Tensor:
    """Read a device value on the host, which only an eager part may do."""
    return y * state.scale + float(y.sum() > 1e9)


def body(execution: Any) -> Tensor:
    state = execution.state
    y = state.x + 1
    z = execution.eager(attend, y)
    w = execution.eager(attend, z * 2)
    return w + y


def test_pieces_and_eager_parts(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(body, State(x, 1.0), "PIECEWISE")
    assert captured.num_graphs == 3
    assert [external.address for external in captured.externals] == [x.data_ptr()]
    for scale in (3.0, 5.0):  # eager parts get the state of the step, not the captured state
        x.add_(1)
        expected = (x + 1) * scale * 2 * scale + (x + 1)
        assert torch.equal(captured.replay(State(x, scale)), expected)
    captured.poison()
    assert torch.equal(captured.replay(State(x, scale)), expected), "a replay writes every value"


def test_a_full_graph_holds_its_eager_parts(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])

    def nested(state: State, y: Tensor) -> Tensor:
        return y * state.scale

    def run(execution: Any) -> Tensor:
        return execution.eager(lambda state, y: execution.eager(nested, y) + 1, execution.state.x + 1)

    captured = graphs.capture(run, State(x, 2.0))
    assert captured.num_graphs == 1
    x.fill_(4)
    assert captured.replay(State(x, 100.0)).tolist() == [11, 11], "host scalars have their captured values"


def test_a_body_may_consist_of_eager_parts_only(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])

    def run(execution: Any) -> Tensor:
        y = execution.eager(attend, execution.state.x)
        return execution.eager(attend, y)

    captured = graphs.capture(run, State(x, 1.0), "PIECEWISE")
    assert captured.num_graphs == 3
    assert captured.replay(State(x, 3.0)).tolist() == [9, 18]


def test_a_capture_undoes_pieces_but_not_eager_parts(graphs: Any) -> None:
    """An eager part runs in a capture as it does in a warm-up."""
    cache, log = graphs.tensor([0.0, 0.0]), graphs.tensor([0.0])

    def write(state: State, y: Tensor) -> Tensor:
        log.add_(1)
        return y + 1

    def run(execution: Any) -> Tensor:
        cache.add_(1)
        y = execution.eager(write, cache * 1)
        cache.add_(y)
        return cache + 0

    captured = graphs.capture(run, None, "PIECEWISE")
    assert cache.tolist() == [0, 0]
    assert log.tolist() == [1]
    assert captured.replay(None).tolist() == [3, 3]
    assert (cache.tolist(), log.tolist()) == ([3, 3], [2])
    assert [e.mutated for e in captured.externals if e.address == cache.data_ptr()] == [True]


def test_tensors_used_by_several_pieces_live_as_long_as_the_graphs(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])

    def run(execution: Any) -> Tensor:
        kept = execution.state.x.exp()
        y = execution.state.x
        for _ in range(3):
            y = execution.eager(attend, y + 1)
            del _
        return y + kept

    bodies = [graphs.capture(run, State(x, 1.0), "PIECEWISE") for _ in range(3)]
    for captured in (*bodies, *bodies[::-1]):
        assert torch.equal(captured.replay(State(x, 1.0)), x + 3 + x.exp())


@pytest.mark.parametrize("in_place", ["argument", "view", "state"])
def test_an_eager_part_may_return_its_argument(graphs: Any, in_place: str) -> None:
    x, other = graphs.tensor([1.0, 2.0]), graphs.tensor([10.0, 20.0])

    def part(state: State, y: Tensor) -> Tensor:
        if in_place == "state":
            return state.x
        y.mul_(state.scale)
        return y if in_place == "argument" else y[:]

    def run(execution: Any) -> tuple[Tensor, Tensor]:
        y = x + 1
        z = execution.eager(part, y)
        z.add_(1)
        return y + 0, z

    captured = graphs.capture(run, State(other, 2.0), "PIECEWISE")
    assert other.tolist() == [10, 20]
    y, z = captured.replay(State(graphs.tensor([5.0, 6.0]), 3.0))
    assert other.tolist() == [10, 20], "results are not copied into the captured state"
    if in_place == "state":
        assert (y.tolist(), z.tolist()) == ([2, 3], [6, 7])
    else:
        assert y.tolist() == z.tolist() == [7, 10], "z and y share memory, as in an eager run"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y[:1], r"\(1,\).*\(2,\)"),
        (lambda y: y.double(), "float64.*float32"),
        (lambda y: y.repeat_interleave(2)[::2], r"\(2,\), \(2,\).*\(2,\), \(1,\)"),
        (lambda y: None, "NoneType.*float32"),
    ],
)
def test_an_eager_part_whose_result_has_another_layout_is_named(graphs: Any, change: Any, said: str) -> None:
    x = graphs.tensor([1.0, 2.0])

    def attend_or_not(state: Any, y: Tensor) -> Any:
        return change(y) if state else y + 1

    captured = graphs.capture(lambda e: e.eager(attend_or_not, x + 1) * 2, None, "PIECEWISE")
    captured.replay(None)
    with pytest.raises(GraphError, match=rf"^PIECEWISE 4 tokens: eager part 0 .*attend_or_not.*{said}"):
        captured.replay(True)


def test_a_partial_is_named_by_its_function_and_not_by_its_arguments(graphs: Any) -> None:
    """The text of a tensor argument would read the device, which a capture refuses."""
    x = graphs.tensor([1.0, 2.0])

    def scaled(by: list[Tensor], state: Any, y: Tensor) -> Any:
        return y * by[0] if state is None else None

    captured = graphs.capture(lambda e: e.eager(partial(scaled, [x + 1]), x + 1) * 2, None, "PIECEWISE")
    assert captured.replay(None).tolist() == [8, 18]
    with pytest.raises(GraphError, match=r"eager part 0 .*scaled\)"):
        captured.replay(True)


def test_misuse_of_eager_is_refused(graphs: Any) -> None:
    x = graphs.tensor([1.0])
    kept = []

    def nests(execution: Any) -> Tensor:
        return execution.eager(lambda state, y: execution.eager(attend, y), x)

    def keeps(execution: Any) -> Tensor:
        kept.append(execution)
        return x + 1

    def gives_two(execution: Any) -> Any:
        return execution.eager(lambda state, y: (y, y), x)

    for run in (nests, gives_two):
        with pytest.raises(CaptureError, match=r"^PIECEWISE 4 tokens: eager part"):
            graphs.capture(run, State(x, 1.0), "PIECEWISE")
    graphs.capture(keeps, State(x, 1.0), "PIECEWISE")
    with pytest.raises(CaptureError, match="after the capture"):
        kept[0].eager(attend, x)


def test_a_failing_part_leaves_the_backend_usable(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])

    def fails(state: Any, y: Tensor) -> Tensor:
        raise KeyError("cache")

    def run(execution: Any) -> Tensor:
        x.add_(1)
        return execution.eager(fails, x * 1)

    with pytest.raises(CaptureError, match=r"KeyError.*cache") as caught:
        graphs.capture(run, None, "PIECEWISE")
    assert isinstance(caught.value.__cause__, KeyError)
    assert x.tolist() == [1, 2]
    assert graphs.capture(body, State(x, 1.0), "PIECEWISE").replay(State(x, 1.0)).tolist() == [6, 9]


def test_an_error_of_an_eager_part_in_a_replay_is_raised(graphs: Any) -> None:
    x = graphs.tensor([1.0])

    def part(state: Any, y: Tensor) -> Tensor:
        if state:
            raise KeyError("cache")
        return y

    captured = graphs.capture(lambda e: e.eager(part, x + 1), None, "PIECEWISE")
    with pytest.raises(KeyError, match="cache"):
        captured.replay(True)
    assert captured.replay(None).tolist() == [2]
    captured.release()
    with pytest.raises(GraphError, match="released"):
        captured.replay(None)


@pytest.mark.parametrize("inference", [False, True])
def test_inference_mode(graphs: Any, inference: bool) -> None:
    x = graphs.tensor([1.0, 2.0])
    with torch.inference_mode(inference):
        captured = graphs.capture(body, State(x, 1.0), "PIECEWISE")
    for replay_inference in (False, True):
        with torch.inference_mode(replay_inference):
            assert captured.replay(State(x, 3.0)).tolist() == [38, 57]


def test_a_piece_finds_external_memory_that_an_eager_part_freed(recorded: Any) -> None:
    held = {"cache": torch.tensor([1.0])}

    def part(state: Any, y: Tensor) -> Tensor:
        if state:
            held.clear()
        return y + 1

    captured = recorded.capture(lambda e: e.eager(part, held["cache"] * 2) + held["cache"], None, "PIECEWISE")
    assert captured.replay(None).tolist() == [4]
    with pytest.raises(GraphError, match=r"between two pieces: .* was freed since the capture") as error:
        captured.replay(True)
    assert isinstance(error.value.__cause__, DanglingExternal)
    with pytest.raises(DanglingExternal, match="freed"):
        captured.check_externals()


# --- memory ---------------------------------------------------------------------------------------------------


def test_an_external_argument_of_an_eager_part_lives_as_long_as_the_graphs(graphs: Any) -> None:
    """No operator of a piece uses it, so no check would find that it was freed."""
    held = [graphs.tensor([1.0, 2.0])]
    x, storage = held[0] * 3, ref(held[0].untyped_storage())
    captured = graphs.capture(lambda e: e.eager(lambda state, y: y * 2, held.pop()) + x, None, "PIECEWISE")
    assert storage() is not None
    assert captured.replay(None).tolist() == [5, 10]
    captured.release()
    del captured
    assert storage() is None


def test_an_external_argument_that_an_eager_part_returns_stays_external(graphs: Any) -> None:
    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(lambda e: e.eager(lambda state, y: y, x) + 1, None, "PIECEWISE")
    captured.poison()
    assert x.tolist() == [1, 2]
    assert [external.address for external in captured.externals] == [x.data_ptr()]
    assert captured.replay(None).tolist() == [2, 3]


def test_later_pieces_use_the_memory_of_arguments_and_results(graphs: Any) -> None:
    """All values are right, because arguments and results are read before later pieces overwrite them."""
    x = graphs.tensor([[1.0] * 64] * 4)
    seen: list[list[int]] = []

    def part(state: Any, y: Tensor, half: Tensor) -> Tensor:
        seen[-1] += [y.data_ptr(), half.data_ptr()]
        return y * 2 + half

    def run(execution: Any) -> Tensor:
        seen.append([])
        h = x + 1
        for index in range(6):
            wide = torch.cat([h, h], dim=-1) * (index + 1)
            h = execution.eager(part, wide[:, :64], wide[:, 64:]) - index
            del wide
        return h

    captured = graphs.capture(run, None, "PIECEWISE")
    addresses = seen[-1]
    assert len(set(addresses)) < len(addresses), "no address was reused"
    for value in (1.0, 3.0):
        x.fill_(value)
        seen.append([])
        replayed = captured.replay(None).clone()
        assert seen[-1] == addresses
        assert torch.equal(replayed, run(Execution(None, None)))


class Layers:
    """A forward pass like that of hybrid models: each layer passes wide projections to an eager part."""

    def __init__(self, graphs: Any) -> None:
        self.unit = 64 if graphs.device.type == "cpu" else 32768
        self.x = torch.linspace(0, 1, 64 * self.unit, device=graphs.device).view(64, -1)
        self.keys = [
            *(BatchExecutionDescriptor(CudaGraphMode.FULL, n, n, 1, 1) for n in (8, 4, 2, 1)),
            *(BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, n) for n in range(64, 0, -4)),
        ]

    def body(self, execution: Any) -> dict[str, Tensor]:
        h = execution.state
        for _ in range(8):
            z, gate, y = (h.repeat(1, 4) * 0.5 + 0.1).split([2 * self.unit, self.unit, self.unit], dim=1)
            h = h + execution.eager(self.scan, z, gate, y.contiguous()) * torch.sigmoid(gate)
        return {"hidden": h.tanh(), "tap": h * 0.5}

    @staticmethod
    def scan(state: Tensor, z: Tensor, gate: Tensor, y: Tensor) -> Tensor:
        return y + z[:, ::2] * gate

    def capture(self, backend: Any, keys: Any) -> dict[Any, Any]:
        with backend.session():
            return {key: backend.capture(self.body, key, self.x[: key.num_tokens]) for key in keys}


def test_all_keys_together_need_little_more_memory_than_the_largest(graphs: Any) -> None:
    """Without shared memory, all keys together would need four times as much."""
    layers = Layers(graphs)
    largest = BatchExecutionDescriptor(CudaGraphMode.PIECEWISE, 64)
    alone = layers.capture(get_backend(graphs.name, graphs.device), [largest])[largest].nbytes
    bodies = layers.capture(graphs.backend, layers.keys)
    assert alone > 0
    assert sum(captured.nbytes for captured in bodies.values()) <= 1.2 * alone
    for key in (*layers.keys, *reversed(layers.keys)):
        x = layers.x[: key.num_tokens]
        replayed = {name: each.clone() for name, each in bodies[key].replay(x).items()}
        for name, each in layers.body(Execution(None, x)).items():
            torch.testing.assert_close(replayed[name], each, msg=f"{key}: {name}")


def test_a_capture_that_reads_the_output_of_another_graph_is_refused(graphs: Any) -> None:
    """The capture might get the same memory."""
    x = graphs.tensor([1.0, 2.0])
    captured = graphs.capture(lambda _: (x * 2)[:1])
    first = captured.replay(None)
    with pytest.raises(CaptureError, match="memory of another graph of the same backend"):
        graphs.capture(lambda _: first + 1)
    captured.replay(None)
    assert type(graphs)(graphs.name).capture(lambda _: first + 1).replay(None).tolist() == [3]
    assert graphs.capture(lambda _: x + 1).replay(None).tolist() == [2, 3]


def test_released_outputs_are_empty_and_a_graph_that_reads_them_finds_it(graphs: Any) -> None:
    x, other = graphs.tensor([1.0, 2.0]), type(graphs)(graphs.name)
    first = graphs.capture(lambda _: x * 2)
    output = first.replay(None)
    second = other.capture(lambda _: output + 1)
    assert second.replay(None).tolist() == [3, 5]
    first.release()
    assert output.numel() == 0
    with pytest.raises(DanglingExternal, match="freed"):
        second.check_externals()
