"""Whose memory is whose."""

from __future__ import annotations

import pytest
import torch

from bateleur.cudagraph._memory import Memory
from bateleur.cudagraph.errors import DanglingExternal


def test_the_same_memory_is_met_once() -> None:
    memory = Memory()
    x = torch.zeros(4, 2)
    assert memory.find(x) is None
    block = memory.add(x[1:], owned=False)
    assert memory.find(x) is memory.find(x.t()[0]) is block
    memory.adopt(x)
    assert not block.owned
    (external,) = memory.externals
    assert (external.address, external.nbytes, external.shape) == (x.data_ptr(), 32, (3, 2))
    assert memory.owned == ()


def test_new_memory_is_not_taken_for_freed_memory() -> None:
    """An object that was freed may have the identity of one that is made later."""
    memory = Memory()
    for _ in range(1000):
        tensor = torch.zeros(4)
        assert memory.find(tensor) is None
        memory.add(tensor, owned=True)
        del tensor
    tensor = torch.zeros(4)
    memory.adopt(tensor)
    memory.poison()
    assert tensor.isnan().all()


def test_memory_is_held_weakly() -> None:
    memory = Memory()
    made = torch.zeros(4)
    block = memory.add(made, owned=True)
    given = torch.zeros(2)
    memory.add(given, owned=False)
    del made
    assert block.ref() is None
    assert memory.owned == (block,)
    assert len(memory.check()) == 1
    del given
    with pytest.raises(DanglingExternal, match=r"shape \(2,\)"):
        memory.check()
    memory.poison()
