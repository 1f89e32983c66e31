"""The Triton forms of the geometry against the torch ones.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle.buffers import DraftBuffers
from bateleur.eagle.geometry import FORMS
from bateleur.metadata import BatchLimits, BatchShape, CommonAttentionMetadata, InputBuffers, KVCacheGroup, StepRows

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.eagle.kernels import geometry as kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK, CANARY, GUARD = 4, 123456, 40


@pytest.fixture(params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def guarded(limits: BatchLimits, drafts: int, device: torch.device | str) -> tuple[DraftBuffers, dict[str, Tensor]]:
    """Poisoned buffers, each in the middle of a larger one: a write outside changes a canary."""
    buffers, around = DraftBuffers(limits, drafts, device), {}
    for name, tensor in buffers.tensors().items():
        around[name] = torch.full((tensor.numel() + 2 * GUARD,), CANARY, dtype=tensor.dtype, device=device)
        setattr(buffers, name, around[name][GUARD : GUARD + tensor.numel()].view(tensor.shape))
    buffers.poison()
    return buffers, around


def compare(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in mine.items():
        assert torch.equal(tensor.cpu().nan_to_num(), other[name].nan_to_num()), name


def staged(
    inputs: InputBuffers, context: np.ndarray[Any, Any], lens: np.ndarray[Any, Any], padding: tuple[int, int]
) -> CommonAttentionMetadata:
    rows, tokens, width = len(lens), int(lens.sum()), inputs.groups[0].max_blocks
    table = 1 + np.random.default_rng(7).permutation(rows * width).reshape(rows, width).astype(np.int32)
    step = StepRows(
        query_lens=lens.astype(np.int32),
        num_computed_tokens=context.astype(np.int32),
        is_prefilling=np.zeros(rows, bool),
        token_ids=np.arange(100, 100 + tokens, dtype=np.int32),
        block_tables=(table,),
    )
    sizes = rows + padding[0], tokens + sum(padding)
    return inputs.stage(step, BatchShape(rows, tokens, *sizes, max(lens, default=1)))


@pytest.mark.parametrize(
    ("rows", "longest", "padding", "drafts", "limit"),
    [
        (0, 1, (0, 0), 1, 64),
        (0, 1, (3, 2), 2, 64),
        (1, 1, (0, 0), 1, 64),
        (5, 6, (2, 3), 3, 20),
        (300, 4, (12, 5), 4, 64),
        (257, 1, (0, 0), 2, 30),
        (1100, 1, (0, 0), 1, 64),
    ],
    ids=str,
)
def test_kernels_write_what_torch_writes(
    device: torch.device, rows: int, longest: int, padding: tuple[int, int], drafts: int, limit: int
) -> None:
    """All entries of all buffers, after every call; more rows and tokens than one tile has."""
    rng = np.random.default_rng(rows)
    lens = rng.integers(1, longest + 1, rows)
    context = rng.integers(0, 64 - longest - drafts, rows)
    limits = BatchLimits(rows + padding[0] + 3, int(lens.sum()) + sum(padding) + 9, 64)
    group = KVCacheGroup(BLOCK, 64 // BLOCK, lookahead_tokens=rows % 3)
    kept = BatchLimits(limits.max_num_reqs, limits.max_num_tokens, limit)
    batches = [staged(InputBuffers(limits, (group,), place), context, lens, padding) for place in ("cpu", device)]
    (want, around_want), (got, around_got) = guarded(kept, drafts, "cpu"), guarded(kept, drafts, device)
    given = rows + min(padding[0], 1)
    next_token, num_valid = torch.full((given,), 2**62), torch.full((given,), -(2**62))
    next_token[:rows] = torch.from_numpy(rng.integers(-1, 90, rows))
    num_valid[:rows] = torch.from_numpy(rng.integers(0, lens + 3))  # nonsense is cut to size
    arguments = next_token, num_valid
    FORMS["stage_first"].torch(want, batches[0], batches[0].slot_mappings[0], *arguments)
    kernels.stage_first(got, batches[1], batches[1].slot_mappings[0], *(each.to(device) for each in arguments))
    compare(around_got, around_want)
    for step in range(drafts + 1):
        # as a column of the drafts of a block drafter would be, and in another type
        token = torch.from_numpy(rng.integers(-1, 90, (given, 2)).astype(np.int32 if step else np.int64))[:, 1]
        FORMS["stage_next"].torch(want, token.clone(), batches[0].block_tables[0], BLOCK, step == 0)
        kernels.stage_next(got, token.to(device), batches[1].block_tables[0], BLOCK, step == 0)
        compare(around_got, around_want)


def test_cuda_takes_the_kernels(device: torch.device) -> None:
    buffers = DraftBuffers(BatchLimits(1, 1, 8), 1, device)
    for name in ("stage_first", "stage_next"):
        form = FORMS[name].on(buffers.seq_lens)
        assert (form is getattr(kernels, name)) == (device.type == "cuda")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__)
