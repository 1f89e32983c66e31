"""Memory in pages of 2 MiB."""

from itertools import pairwise

import pytest
import torch

from bateleur.metadata.native.huge_pages import HugePages, zeros


def test_tensors_in_huge_pages_lie_apart_and_by_lines() -> None:
    memory = HugePages()
    shapes = [(3, 5), (1,), (4, 1 << 24), (7, 9), (1 << 24,), (2, 3)]
    tensors = [memory.empty(*shape, dtype=torch.bfloat16) for shape in shapes]
    ends = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert all(each.data_ptr() % 64 == 0 and each.is_contiguous() for each in tensors)
    assert [each.shape for each in tensors] == shapes
    assert tensors[0].data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (4, 1 << 19), (3, 7, 100_003)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype=dtype, device="cpu")
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.dtype == dtype
    assert made.is_contiguous()
    made.fill_(3)
    assert not zeros(shape, dtype=dtype, device="cpu").any()


def test_zeros_outside_of_a_cpu_are_torchs() -> None:
    assert zeros((4, 1 << 20), dtype=torch.float32, device="meta").device.type == "meta"


def test_caches_that_no_memory_holds_are_refused_by_their_size() -> None:
    with pytest.raises(MemoryError, match=r"no room for 4,611,686,018,427,387,904 bytes"):
        zeros((1 << 62,), dtype=torch.int8, device="cpu")
