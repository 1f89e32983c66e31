"""The kernels of device-side staging equal the torch implementation bit for bit.

They run in Triton's interpreter on a CPU, and on CUDA if there is a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from bateleur.metadata._device_fields import CELLS, EXPAND, GATHER, DeviceFields, DeviceStep

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS, TOKENS, POISON = 6, 300, 77


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the kernels."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture
def kernels() -> Any:
    """The module under test, imported late: Triton selects its interpreter at import."""
    from bateleur.metadata.kernels import device_fields

    return device_fields


def fields(device: str, block_sizes: tuple[int, ...]) -> DeviceFields:
    def poisoned(size: int, dtype: torch.dtype) -> Tensor:
        return torch.full((size,), POISON, dtype=dtype, device=device)

    i32, i64 = torch.int32, torch.int64
    slots = []
    for size in block_sizes:
        table = torch.arange(ROWS * 90, dtype=i32, device=device).reshape(ROWS, 90) % 50  # some are null
        slots.append((poisoned(TOKENS, i64), table, size))
    rows = [poisoned(ROWS, i32) for _ in range(2)]
    starts = poisoned(ROWS + 1, i32)
    return DeviceFields(poisoned(TOKENS, i32), poisoned(TOKENS, i64), starts, *rows, tuple(slots), seq_len_fill=1)


def contents(x: DeviceFields) -> list[Any]:
    tensors = [x.input_ids, x.positions, x.query_start_loc, x.seq_lens, x.num_computed_tokens]
    return [each.tolist() for each in (*tensors, *(slots for slots, _, _ in x.slots))]


@pytest.mark.parametrize("block_sizes", [(), (16,), (5, 16)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lens", [[1], [2, 2, 2], [1, 270, 1, 4], []], ids=str)
def test_expand(kernels: Any, device: str, lens: list[int], dtype: torch.dtype, block_sizes: tuple[int, ...]) -> None:
    def on_device(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    count = sum(lens)
    step = DeviceStep(
        num_reqs=len(lens),
        num_tokens=count,
        num_computed_tokens=on_device([7 * i + 3 for i in range(len(lens))], dtype),
        query_start_loc=on_device([0, *lens]).cumsum(0).int(),
        token_ids=on_device(range(11, 11 + max(count - 1, 0))),
    )
    expected, found = fields(device, block_sizes), fields(device, block_sizes)
    EXPAND.torch(expected, step)
    kernels.expand(found, step)
    assert contents(found) == contents(expected)
    assert found.query_start_loc.tolist() == [0, *accumulate(lens), *[count] * (ROWS - len(lens))]
    assert found.positions[count:].eq(0).all()
    before = contents(found)
    again = replace(step, query_start_loc=found.query_start_loc[: len(lens) + 1])  # unchanged starts are not sent
    kernels.expand(found, again)
    assert contents(found) == before


def tables(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables of a batch of 6 rows, and of 8 requests and the null row; 700 columns each."""
    request_tables = torch.arange(9 * 700, dtype=torch.int32, device=device).reshape(9, 700)
    request_tables[8] = 0
    rows = torch.full((ROWS,), 5, dtype=torch.int32, device=device)
    return torch.full((ROWS, 700), POISON, dtype=torch.int32, device=device), request_tables, rows


@pytest.mark.parametrize("width", [0, 3, 700])
def test_gather_rows(kernels: Any, device: str, width: int) -> None:
    """Row 2 was cleared, and the last two batch rows are unused."""
    source = torch.tensor([7, -3, 0, 8, 8], dtype=torch.int32, device=device)
    expected, found = tables(device), tables(device)
    GATHER.torch(*expected, source, width)
    kernels.gather_block_tables(*found, source, width)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert found[2].tolist() == [7, 2, 0, 8, 8, 5]


def test_write_cells(kernels: Any, device: str) -> None:
    count = 260
    cells = (torch.randperm(ROWS * 700, generator=torch.Generator().manual_seed(0))[:count]).int().to(device)
    ids = torch.arange(1000, 1000 + count, dtype=torch.int32, device=device)
    expected, found = tables(device), tables(device)
    for each in (expected, found):
        each[2][:] = torch.tensor([3, 1, 4, 0, 5, 2])
    CELLS.torch(*expected, cells, ids)
    kernels.write_cells(*found, cells, ids)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
