"""`TrackedMemory`: owned and external storages of a capture."""

from __future__ import annotations

import pytest
import torch

from bateleur.cudagraph._memory import TrackedMemory
from bateleur.cudagraph.errors import DanglingExternal


def test_a_storage_is_tracked_once() -> None:
    memory = TrackedMemory()
    x = torch.zeros(4, 2)
    assert memory.find(x) is None
    tracked = memory.add(x[1:], owned=False)
    assert memory.find(x) is memory.find(x.t()[0]) is tracked
    (external,) = memory.externals
    assert (external.address, external.nbytes, external.shape) == (x.data_ptr(), 32, (3, 2))
    assert memory.owned == ()


def test_new_memory_is_not_mistaken_for_freed_memory() -> None:
    """A freed object may have the same id as a later one."""
    memory = TrackedMemory()
    for _ in range(1000):
        tensor = torch.zeros(4)
        assert memory.find(tensor) is None
        memory.add(tensor, owned=True)
        del tensor
    tensor = torch.zeros(4)
    memory.add(tensor, owned=True)
    memory.poison()
    assert tensor.isnan().all()


def test_tracked_memory_is_not_kept_alive() -> None:
    memory = TrackedMemory()
    made = torch.zeros(4)
    tracked = memory.add(made, owned=True)
    given = torch.zeros(2)
    memory.add(given, owned=False)
    del made
    assert tracked.ref() is None
    assert memory.owned == (tracked,)
    assert len(memory.check()) == 1
    del given
    with pytest.raises(DanglingExternal, match=r"shape \(2,\)"):
        memory.check()
    memory.poison()
