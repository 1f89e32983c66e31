"""The Triton and the torch backend on a GPU: realistic sizes, captured graphs, long contexts, large caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.metadata import (
    AttentionBackend,
    BatchLimits,
    BatchShape,
    BuildPhase,
    InputBuffers,
    KVCacheGroup,
    StepRows,
    get_backend,
)
from bateleur.metadata.backends.reference import ReferenceBackend

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, BLOCK = 32, 8, 16
BATCHES = {
    "decode": ([1] * 5, [0, 511, 512, 3000, 77]),
    "drafts": ([5, 5, 2, 5], [900, 1, 64, 0]),
    "mixed": ([1, 1, 130, 33, 1], [2500, 3, 900, 0, 40]),
}


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def _stage(buffers: InputBuffers, name: str, shape: BatchShape | None = None) -> Any:
    query_lens, computed = (np.array(values, np.int32) for values in BATCHES[name])
    rng = np.random.default_rng(0)
    width, rows = buffers.groups[0].max_blocks, len(query_lens)
    table = 1 + rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    step = StepRows(
        query_lens=query_lens,
        num_computed_tokens=computed,
        is_prefilling=query_lens > 1,
        token_ids=np.ones(query_lens.sum(), np.int32),
        block_tables=(table,),
    )
    total = int(query_lens.sum())
    return buffers.stage(step, shape or BatchShape(rows, total, rows + 3, total + 7, int(query_lens.max())))


def _tensors(batch: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Projection (T, heads, D), rotary table (T, 1, D) and caches: random, on CPU first so that all agree."""
    generator = torch.Generator().manual_seed(0)
    blocks = int(batch.block_tables[0].max()) + 1
    projection = torch.randn(batch.num_tokens, HEADS + 2 * KV_HEADS, head_dim, generator=generator)
    projection[batch.num_actual_tokens :] = float("nan")
    table = torch.randn(batch.num_tokens, 1, head_dim, generator=generator)  # cosine and sine of half the lanes
    caches = torch.randn(2, blocks, BLOCK, KV_HEADS, head_dim, generator=generator)
    caches[:, 0] = float("nan")
    caches[:, 0, 0] = 0
    return tuple(each.to(device, dtype) for each in (projection, table, caches))


def _buffers(device: torch.device | str) -> InputBuffers:
    limits = BatchLimits(max_num_reqs=16, max_num_tokens=512, max_model_len=4096)
    return InputBuffers(limits, (KVCacheGroup(BLOCK, 4096 // BLOCK),), device)


def _attend(
    backend: AttentionBackend, name: str, place: torch.device, dtype: torch.dtype, head_dim: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """The output of a batch, and the caches after it, on the CPU."""
    batch = _stage(_buffers(place), name)
    projection, table, caches = _tensors(batch, head_dim, dtype, place)
    q, k, v = projection.split([HEADS, KV_HEADS, KV_HEADS], 1)
    rotary: Any = table[..., : head_dim // 2], table[..., head_dim // 2 :]
    if not backend.fuses_rotary:
        for x in (q[..., : head_dim // 2], k[..., : head_dim // 2]):
            x.copy_(x * rotary[0] + x.roll(head_dim // 4, -1) * rotary[1])
        rotary = None
    meta = backend.builder().build(batch, 0)
    out = backend.attend(q, k, v, (caches[0], caches[1]), meta, head_dim**-0.5, window, rotary)
    return out.cpu(), caches.cpu()


@cache
def _expected(name: str, dtype: torch.dtype, head_dim: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the reference output; takes up to 30 s."""
    return _attend(ReferenceBackend(), name, torch.device("cpu"), dtype, head_dim, window)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "tolerance"),
    [(torch.bfloat16, 128, 4e-2), (torch.bfloat16, 64, 4e-2), (torch.float16, 256, 6e-3), (torch.float32, 80, 1e-5)],
)
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", BATCHES)
def test_backends_on_a_gpu_equal_the_reference(
    device: torch.device,
    name: str,
    backend: str,
    dtype: torch.dtype,
    head_dim: int,
    tolerance: float,
    window: int | None,
) -> None:
    chosen = get_backend(backend, device=device, dtype=dtype, head_dim=head_dim, sliding_window=window)
    out, caches = _attend(chosen, name, device, dtype, head_dim, window)
    expected, expected_caches = _expected(name, dtype, head_dim, window)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, expected_caches, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("name", "promise"), [("decode", 1), ("drafts", 5), ("mixed", 448)])
def test_a5_a_captured_step_equals_the_eager_one_bit_for_bit(device: torch.device, name: str, promise: int) -> None:
    """Capture a dummy at the longest length, replay a large batch, then replay and compare."""
    backend = get_backend("triton", device=device, dtype=torch.bfloat16, head_dim=128)
    buffers, builder = _buffers(device), backend.builder()
    rows, total = len(BATCHES[name][0]), sum(BATCHES[name][0])
    tokens = {"decode": 8, "drafts": 40, "mixed": 448}[name]
    shape = BatchShape(rows, total, 8, tokens, promise)
    batch = _stage(buffers, name, shape)
    projection, table, caches = _tensors(batch, 128, torch.bfloat16, device)
    static = projection.clone()

    def step(meta: Any) -> Tensor:
        q, k, v = static.split([HEADS, KV_HEADS, KV_HEADS], 1)
        rotary = table[..., :64], table[..., 64:]
        return backend.attend(q, k, v, (caches[0], caches[1]), meta, 0.1, None, rotary)

    def dummy() -> Any:
        batch = buffers.dummy(BatchShape(0, 0, 8, tokens, promise), max_seq_len=4096)
        return builder.build(batch, 0, BuildPhase.CAPTURE)

    step(dummy())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    meta = dummy()
    with torch.cuda.graph(graph):
        out = step(meta)
    static.normal_()
    graph.replay()  # rows without tokens: all of the output is padding
    assert (out == 0).all()
    eager_meta = builder.build(_stage(buffers, name, shape), 0, BuildPhase.CAPTURE)  # the same kernels for all rows
    static.copy_(projection)
    expected = step(eager_meta)
    static.copy_(projection)
    graph.replay()
    assert torch.equal(out[:total], expected[:total])
    assert (out[total:] == 0).all()


def test_offsets_beyond_two_billion_elements(device: torch.device) -> None:
    """The last block of a cache beyond int32 offsets."""
    blocks = 2**31 // (BLOCK * KV_HEADS * 128) + 8
    if torch.cuda.mem_get_info()[0] < 5 * 2**31:
        pytest.skip("needs 10 GiB of free device memory")
    backend = get_backend("triton", device=device, dtype=torch.bfloat16, head_dim=128)
    caches = [torch.empty(blocks, BLOCK, KV_HEADS, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for side in caches:
        side[0].zero_()
    buffers = InputBuffers(BatchLimits(2, 8, 16), (KVCacheGroup(BLOCK, 1),), device)
    last = np.array([[blocks - 1], [blocks - 2]], np.int32)
    rows = StepRows(
        query_lens=np.array([1, 5], np.int32),
        num_computed_tokens=np.zeros(2, np.int32),
        is_prefilling=np.array([True, True]),
        token_ids=np.ones(6, np.int32),
        block_tables=(last,),
    )
    meta = backend.builder().build(buffers.stage(rows, BatchShape(2, 6, 2, 6, 5)), 0)
    q, k, v = (torch.randn(6, heads, 128, dtype=torch.bfloat16, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = backend.attend(q, k, v, (caches[0], caches[1]), meta, 0.1)
    assert torch.equal(caches[0][-1, 0], k[0])
    assert torch.equal(caches[1][-2, :5], v[1:])
    expected = v[0].repeat_interleave(HEADS // KV_HEADS, 0)  # one key: its value
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(out[1], v[1].repeat_interleave(HEADS // KV_HEADS, 0))
