"""One rule defines what makes the host wait, for captures on a CPU and for the conformance checks of builders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bateleur.cudagraph import BatchExecutionDescriptor, CudaGraphMode, HostSync, RecordedBackend, _host_sync
from bateleur.metadata.conformance import _host_sync as its_twin
from bateleur.metadata.conformance import _spy

KEY = BatchExecutionDescriptor(CudaGraphMode.FULL, 4, 4, 1, 1)

WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda x, mask: x[0].item(),
    "branch": lambda x, mask: bool(mask.any()),
    "index": lambda x, mask: x[x[0]],
    "nonzero": lambda x, mask: x.nonzero(),
    "where": lambda x, mask: torch.where(mask),
    "mask": lambda x, mask: x[mask],
    "mask and rows": lambda x, mask: x.expand(3, 3)[x[:2], mask],
    "masked values": lambda x, mask: x.index_put((mask,), x[:1]),
    "masked sum": lambda x, mask: x.index_put((mask,), x[0], accumulate=True),
    "masked_select": lambda x, mask: x.masked_select(mask),
    "unique": lambda x, mask: x.unique(),
    "equal": lambda x, mask: torch.equal(x, x),
    "allclose": lambda x, mask: torch.allclose(x, x),
    "bincount": lambda x, mask: x.bincount(),
    "argwhere": lambda x, mask: x.argwhere(),
    "repeat_interleave": lambda x, mask: x.repeat_interleave(x),
    "tolist": lambda x, mask: x.tolist(),
    "numpy": lambda x, mask: x.numpy(),
    "text": lambda x, mask: str(x),
}
PASSES: dict[str, Callable[[Any, Any], Any]] = {
    "fill where masked": lambda x, mask: x.clone().__setitem__(mask, 7),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 7),
    "where": lambda x, mask: torch.where(mask, x, -x),
    "rows": lambda x, mask: x.index_put((x.clamp(0, 2),), x),
    "repeat to a size": lambda x, mask: x.repeat_interleave(x.clamp(1, 1), output_size=3),
    "sorted": lambda x, mask: x.sort().values + x.cumsum(0),
}


def watched(call: Callable[[Any, Any], Any]) -> list[str]:
    """The host syncs that the builder checks find in a call."""
    notes: list[str] = []
    x, mask = torch.tensor([1, 0, 2]), torch.tensor([True, False, True])
    with _spy.NoSync([x, mask], notes.append):
        call(x + 0, mask | mask)
    return notes


def capture(call: Callable[[Any, Any], Any]) -> None:
    x, mask = torch.tensor([1, 0, 2]), torch.tensor([True, False, True])
    RecordedBackend().capture(lambda _: call(x + 0, mask | mask), KEY, None)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_m1_a_wait_is_found_by_both(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert watched(WAITS[name])
        with pytest.raises(HostSync):
            capture(WAITS[name])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_m1_what_does_not_wait_passes_both(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert watched(PASSES[name]) == []
        capture(PASSES[name])


def test_m1_a_number_of_the_host_fills_and_one_of_the_device_is_counted() -> None:
    """As on a CUDA device, where `x[mask] = 7` has its value on the host."""
    put = torch.ops.aten.index_put_.default
    x, mask, number = torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.tensor(7.0)
    for on_device, accumulate, waits in (
        ((x, mask), False, False),
        ((x, mask), True, True),
        ((x, mask, number), False, True),
    ):
        there = {id(tensor) for tensor in on_device}
        args = (x, [mask], number, accumulate)
        assert _host_sync.waits_for_device(put, args, {}, lambda tensor, there=there: id(tensor) in there) is waits


def test_the_rule_stands_in_both_packages() -> None:
    assert Path(_host_sync.__file__).read_text() == Path(its_twin.__file__).read_text()
