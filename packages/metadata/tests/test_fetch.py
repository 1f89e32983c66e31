"""Asynchronous copies to the host."""

import pytest
import torch

from bateleur.metadata import Fetch


def test_what_was_given_comes_in_its_order() -> None:
    given = [torch.arange(6).view(2, 3), torch.tensor([0.5, -1.0])]
    first, second = Fetch(given).wait()
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [0.5, -1.0]


def test_no_tensors() -> None:
    assert Fetch([]).wait() == []


@pytest.mark.gpu
def test_what_is_queued_later_is_not_waited_for() -> None:
    """The copy has the contents at its creation, and arrives while the device is still busy."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensor = torch.ones(4, device="cuda")
    Fetch([tensor]).wait()  # the first pinned buffer is allocated, which waits
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    fetched = Fetch([tensor])
    for _ in range(50):
        busy = busy @ busy
        tensor.add_(1)
    end = torch.cuda.Event()
    end.record()
    (got,) = fetched.wait()
    assert not end.query()
    assert got.tolist() == [1, 1, 1, 1]
