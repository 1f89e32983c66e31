"""`poison_`: NaN, True, or integers out of range for every dtype."""

from __future__ import annotations

import pytest
import torch

from bateleur.cudagraph._memory import poison_

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_poison(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = torch.zeros(6, dtype=dtype)
    poison_(tensor[1::2])
    kept, poisoned = tensor[::2], tensor[1::2]
    assert not kept.view(torch.uint8).any() if dtype.itemsize == 1 else not kept.any()
    if dtype in FLOATS or dtype.is_complex:
        assert poisoned.float().isnan().all() if not dtype.is_complex else poisoned.isnan().all()
    elif dtype is torch.bool:
        assert poisoned.all()
    else:
        info = torch.iinfo(dtype)
        assert set(poisoned.tolist()) == {info.min // 2 if info.min else info.max}
