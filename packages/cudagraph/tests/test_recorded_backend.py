"""`RecordedBackend`: behaviour that other backends do not have."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.cudagraph.backends.recorded import BLOCK_BYTES
from bateleur.cudagraph.errors import AddressMoved, CaptureError, DanglingExternal, GraphError, HostSync

READS: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: np.from_dlpack(x),
    "__repr__": lambda x: repr(x),
    "__format__": lambda x: f"{x}",
    "apply_": lambda x: x.apply_(lambda value: value),
    "_linalg_check_errors": lambda x: torch.linalg.inv(x.expand(2, 2) + torch.eye(2)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_reads_of_memory_without_an_operator_are_refused(recorded: Any, name: str, inference: bool) -> None:
    x = torch.tensor([1.0, 2.0])
    with torch.inference_mode(inference):
        with pytest.raises(HostSync, match=name):
            recorded.capture(lambda _: READS[name](x + 1))
        with pytest.raises(HostSync, match=name):
            recorded.capture(lambda _: READS[name](x))
    READS[name](x)


HOST_DATA: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "scalar tensor": lambda: torch.tensor(1.0),
    "legacy tensor": lambda: torch.Tensor([1.0, 2.0]),
    "as_tensor": lambda: torch.as_tensor(np.ones(2)),
    "asarray": lambda: torch.asarray(np.ones(2)),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", HOST_DATA)
def test_tensors_of_host_data_are_refused(recorded: Any, name: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(CaptureError, match="of host data"):
        recorded.capture(lambda _: HOST_DATA[name]() + 1)


def test_a_tensor_of_host_data_that_is_kept_is_refused_too(recorded: Any) -> None:
    """On CUDA it is a copy from pageable memory, which no graph can hold."""
    kept = []

    def body(_: Any) -> Tensor:
        kept.append(torch.tensor([1.0, 2.0]))
        return kept[-1] + 1

    with pytest.raises(CaptureError, match="a tensor was made of host data"):
        recorded.capture(body)


def test_a_caught_read_still_fails_the_capture(recorded: Any) -> None:
    def body(_: Any) -> Tensor:
        with suppress(RuntimeError):
            torch.ones(2).tolist()
        return torch.ones(2)

    with pytest.raises(HostSync, match="tolist"):
        recorded.capture(body)


def test_outputs_and_intermediates_are_poisoned_until_the_first_replay(recorded: Any) -> None:
    x = torch.tensor([1.0, 2.0])
    leaked, output = [], {}

    def body(_: Any) -> dict[str, Tensor]:
        leaked.append(x + 1)
        made = leaked[0] * 2
        output.update(
            float=made,
            bfloat=made.bfloat16(),
            int=made.long(),
            small=made.to(torch.int8),
            byte=made.to(torch.uint8),
            bool=made > 100,
            complex=made.to(torch.complex64),
        )
        return output

    captured = recorded.capture(body)
    spoiled = {name: value.tolist() for name, value in output.items()}
    assert leaked[0].isnan().all()
    assert output["bfloat"].isnan().all()
    assert output["complex"].isnan().all()
    assert spoiled["int"][0] < -(2**61)
    assert spoiled["small"] == [-64, -64]
    assert spoiled["byte"] == [255, 255]
    assert spoiled["bool"] == [True, True]
    assert captured.replay(None)["int"].tolist() == [4, 6]
    assert leaked[0].tolist() == [2, 3], "every replay writes the intermediates, at the same addresses"


def test_empty_writes_nothing_in_a_replay(recorded: Any) -> None:
    """`torch.empty` is not recorded. Reading it before writing it gives poison, or values of another replay."""
    x = torch.tensor([1.0, 2.0, 3.0])

    def body(_: Any) -> Tensor:
        made = torch.empty(3)
        made[:2] = x[:2]
        return made + 0

    captured = recorded.capture(body)
    first = captured.replay(None)
    assert first[:2].tolist() == [1, 2]
    assert first[2].isnan()


def test_freed_external_memory_is_never_read(recorded: Any) -> None:
    held = {"x": torch.tensor([1.0])}
    made = []

    def body(execution: Any) -> None:
        made.append(execution.state["x"] + 1)

    captured = recorded.capture(body, held)
    del held["x"]
    for _ in range(2):
        with pytest.raises(DanglingExternal, match=r"shape \(1,\).*freed"):
            captured.replay(None)
    assert made[0].isnan().all()


@pytest.mark.parametrize("piecewise", [False, True])
def test_a_captured_body_keeps_neither_body_nor_state_alive(recorded: Any, piecewise: bool) -> None:
    class State:
        x = torch.tensor([1.0])

    state = State()

    def body(execution: Any) -> Tensor:
        y = execution.state.x + 1
        return execution.eager(lambda s, t: t * 2, y) if piecewise else y

    captured = recorded.capture(body, state, "PIECEWISE" if piecewise else "FULL")
    gone = [weakref.ref(state), weakref.ref(body)]
    del state, body
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    captured.check_externals()


def test_resized_external_memory_is_found(recorded: Any) -> None:
    """Example: a workspace that grew after the capture."""
    workspace = torch.zeros(4)
    captured = recorded.capture(lambda _: workspace.add_(1))
    workspace.resize_(1 << 20)
    with pytest.raises(AddressMoved, match="resized"):
        captured.replay(None)
    with pytest.raises(AddressMoved, match="resized"):
        captured.check_externals()


def test_external_memory_freed_during_the_capture_is_refused(recorded: Any) -> None:
    held = [torch.tensor([1.0]), torch.zeros(4)]

    def frees(_: Any) -> Tensor:
        return held.pop(0) + 1

    with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*freed since .* began, before the capture ended\."):
        recorded.capture(frees)
    with pytest.raises(CaptureError, match=r"^FULL 4 tokens.*: its storage was resized, before the capture ended\."):
        recorded.capture(lambda _: held[0].add_(1).resize_(1 << 20))


def test_a_failed_capture_is_undone(recorded: Any) -> None:
    """External memory and random generators are restored bit for bit."""
    buffers = [torch.full((4,), float("nan")), torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bool)]
    buffers[0].view(torch.int32)[1] = 0x7FC12345
    before = [b.clone().view(torch.uint8).tolist() for b in buffers]
    generator = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), generator.get_state()

    def body(_: Any) -> None:
        buffers[0].uniform_().add_(torch.rand(4, generator=generator))
        buffers[1][1, 1:].zero_()
        torch.logical_not(buffers[2], out=buffers[2])
        raise ZeroDivisionError

    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        recorded.capture(body)
    assert [b.view(torch.uint8).tolist() for b in buffers] == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_an_explicit_generator_advances_with_each_replay(recorded: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    captured = recorded.capture(lambda _: torch.rand(4, generator=generator))
    expected = [torch.rand(4, generator=torch.Generator().manual_seed(1))]
    first = captured.replay(None).clone()
    assert torch.equal(first, expected[0])
    assert not torch.equal(captured.replay(None), first)


def test_a_custom_operator_is_recorded_as_one_call(recorded: Any) -> None:
    """Operators inside of it are not seen, as with a kernel, and their memory is not owned by the graph."""
    library = torch.library.Library("bateleur_test", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: (x.expand(1000, 2) * 2).sum(0) + bool(x.sum() > 0), "CPU")
    x = torch.tensor([1.0, 2.0])
    captured = recorded.capture(lambda _: torch.ops.bateleur_test.opaque(x))
    assert captured.nbytes == BLOCK_BYTES, "only its result"
    assert captured.replay(None).tolist() == [2001, 4001]
    library._destroy()


def test_a_result_whose_shape_depends_on_values_is_found(recorded: Any) -> None:
    library = torch.library.Library("bateleur_test", "FRAGMENT")
    library.define("positive(Tensor x) -> Tensor")
    library.impl("positive", lambda x: x[x > 0], "CPU")
    x = torch.tensor([1.0, 2.0])
    captured = recorded.capture(lambda _: torch.ops.bateleur_test.positive(x))
    x[0] = -1
    with pytest.raises(GraphError, match=r"positive.*\(1,\).*\(2,\)"):
        captured.replay(None)
    library._destroy()


def test_tensor_subclasses_are_refused(recorded: Any) -> None:
    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.zeros(2)

    x = torch.zeros(2).as_subclass(Wrapped)
    with pytest.raises(CaptureError, match="Wrapped"):
        recorded.capture(lambda _: x + 1)


def test_nbytes_of_a_captured_body(recorded: Any) -> None:
    x = torch.zeros(256)
    captured = recorded.capture(lambda _: (x + 1).view(2, 128) * 2)
    assert captured.nbytes == 2 * 1024
    assert captured.num_graphs == 1
    captured.release()
    with pytest.raises(GraphError, match="released"):
        captured.replay(None)


def test_a_body_may_replay_a_captured_body(recorded: Any) -> None:
    """The operators of the inner replay are recorded in the outer body. Both need backend objects of their own."""
    x = torch.tensor([1.0])
    inner = recorded.capture(lambda _: x * 2)
    outer = type(recorded)("recorded").capture(lambda _: inner.replay(None) + 1)
    x.fill_(5)
    assert outer.replay(None).tolist() == [11]
    with pytest.raises(CaptureError, match="memory of another graph of the same backend"):
        recorded.capture(lambda _: inner.replay(None) + 1)


def test_empty_tensors_and_bodies_without_operators(recorded: Any) -> None:
    none = torch.empty(0, 4)
    captured = recorded.capture(lambda _: (none * 2, none.sum(0)))
    assert captured.replay(None)[0].shape == (0, 4)
    assert captured.replay(None)[1].tolist() == [0, 0, 0, 0]
    assert recorded.capture(lambda _: 1).replay(None) == 1
