"""Zero-initialised CPU tensors that are committed at the first write."""

from pathlib import Path

import pytest
import torch

from bateleur.metadata.native.lazy_zeros import lazy_zeros


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (4, 1 << 19), (3, 7, 100_003)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_lazy_zeros_equal_torch_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = lazy_zeros(shape, dtype=dtype, device="cpu")
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.dtype == dtype
    assert made.is_contiguous()
    made.fill_(3)
    assert not lazy_zeros(shape, dtype=dtype, device="cpu").any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_committed_at_the_first_write() -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    made = lazy_zeros((1 << 28,), dtype=torch.int8, device="cpu")
    assert resident_pages() - before < 1 << 14, "64 MiB of 256"
    made.fill_(1)
    assert resident_pages() - before > 1 << 15


def test_other_devices_use_torch_zeros() -> None:
    assert lazy_zeros((4, 1 << 20), dtype=torch.float32, device="meta").device.type == "meta"


def test_a_size_beyond_memory_is_refused() -> None:
    with pytest.raises(MemoryError, match=r"no room for 4,611,686,018,427,387,904 bytes"):
        lazy_zeros((1 << 62,), dtype=torch.int8, device="cpu")
