"""Plans given to FlashInfer, checked with a double that attends by the plan alone; results on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_double import Double, install
from torch import Tensor

from bateleur.metadata import (
    BatchLimits,
    BatchShape,
    InexactBound,
    InputBuffers,
    KVCacheGroup,
    check_reads,
    get_backend,
)
from bateleur.metadata.attention_metadata_builder import BuildPhase, GraphSupport
from bateleur.metadata.backends.flashinfer import FlashInferBackend, page_indices, page_indptr_and_last_lens
from bateleur.metadata.backends.reference import ReferenceBackend

BATCHES = {
    "decode": ([1, 1, 1], [0, 61, 17]),
    "one": ([1], [34]),
    "prefill": ([13, 2, 29], [0, 0, 0]),
    "chunked": ([5, 17, 3], [44, 11, 60]),
    "mixed": ([1, 1, 1, 7, 1, 19], [9, 40, 0, 50, 12, 0]),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    """All wrappers created by the double of flashinfer."""
    return install(monkeypatch)


def _step(
    make: Any,
    name: str,
    block_size: int,
    heads: tuple[int, int],
    *,
    dim: int = 16,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    padding: int = 2,
) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return a padded batch, its queries, keys and values, and a cache with every context."""
    query_lens, computed = BATCHES[name]
    groups = (KVCacheGroup(block_size, -(-70 // block_size)),)
    buffers = InputBuffers(BatchLimits(9, 70, 70), groups, device)
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    padded = num_reqs + padding, num_tokens + padding
    batch = buffers.stage(
        make.rows(query_lens, computed, groups), BatchShape(num_reqs, num_tokens, *padded, max(query_lens))
    )
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    tensors = tuple(random(batch.num_tokens, count, dim) for count in (heads[0], heads[1], heads[1]))
    blocks = 1 + num_reqs * groups[0].max_blocks
    cache = random(blocks, block_size, heads[1], dim), random(blocks, block_size, heads[1], dim)
    for side in cache:
        side[0] = 0
    return batch, tensors, cache


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("block_size", "heads"), [(4, (3, 1)), (5, (6, 2)), (16, (4, 1))])
@pytest.mark.parametrize("name", list(BATCHES))
def test_the_plan_means_what_the_reference_means(
    make: Any, made: list[Double], name: str, block_size: int, heads: tuple[int, int], window: int | None
) -> None:
    results = []
    for backend in (FlashInferBackend(), ReferenceBackend()):
        batch, tensors, cache = _step(make, name, block_size, heads)
        out = backend.attend(*tensors, cache, backend.builder().build(batch, 0), 0.3, window)
        results.append((out, *cache))
        assert (out[batch.num_actual_tokens :] == 0).all(), "padded tokens give 0"
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    kinds = {"decode": [True], "one": [True], "mixed": [True, False]}.get(name, [False])
    assert [wrapper.decode for wrapper in made] == kinds
    assert all(wrapper.use_tensor_cores == (heads == (4, 1)) for wrapper in made if wrapper.decode)
    assert len({wrapper.workspace.data_ptr() for wrapper in made}) == 1


def test_planning_reads_no_device_value(make: Any, made: list[Double]) -> None:
    """Lengths and starts on the device are overwritten: results may depend on tables and slots only."""
    results = []
    for spoil in (False, True):
        backend = FlashInferBackend()
        batch, tensors, cache = _step(make, "mixed", 5, (3, 1))
        meta = backend.builder().build(batch, 0)
        if spoil:
            names = ("seq_lens", "query_start_loc")
            meta = dataclasses.replace(meta, **{n: torch.full_like(getattr(meta, n), 10**6) for n in names})
        results.append(backend.attend(*tensors, cache, meta, 0.3))
    assert torch.equal(*results)


def test_layers_share_a_plan_until_the_next_step(make: Any, made: list[Double]) -> None:
    backend = FlashInferBackend()
    for step in (1, 2):
        batch, tensors, cache = _step(make, "mixed", 5, (3, 1))
        meta = backend.builder().build(batch, 0)
        for _ in range(3):
            backend.attend(*tensors, cache, meta, 0.3)
            backend.attend(*tensors, cache, meta, 0.3, 6)
        assert [wrapper.num_plans for wrapper in made] == [step] * 4  # decode and others, with and without window
    other = backend.builder().build(batch, 0)
    backend.attend(*tensors, cache, other, 0.3)
    backend.attend(*tensors, cache, meta, 0.3)
    assert [wrapper.num_plans for wrapper in made] == [4, 4, 2, 2], "a plan of another batch is never run"


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("query_len", [1, 3])
def test_batches_of_a_captured_shape_are_planned_into_its_buffers(
    make: Any, made: list[Double], query_len: int, window: int | None
) -> None:
    """Planning happens with the metadata, because a replay calls no layer. Padded rows see the null block."""
    groups, backend, reference = (KVCacheGroup(4, 18),), FlashInferBackend(), ReferenceBackend()
    buffers, builder = InputBuffers(BatchLimits(5, 15, 70), groups, "cpu"), backend.builder()
    q, k, v = (torch.randn(5 * query_len, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    shape = BatchShape(5, 5 * query_len, 5, 5 * query_len, query_len)
    cache = tuple(torch.randn(91, 4, 2, 8, dtype=torch.float64) for _ in range(2))
    for side in cache:
        side[0, 0] = 0
    for phase in (BuildPhase.WARMUP, BuildPhase.CAPTURE):
        meta = builder.build(buffers.dummy(shape, max_seq_len=70), 0, phase)
        backend.attend(q, k, v, cache, meta, 0.3, window)
    (wrapper,) = made
    assert wrapper.num_plans == 2
    book = dict(builder.addresses())
    assert {tensor.data_ptr() for tensor in wrapper.buffers.values()} == set(book.values())
    for rows in (5, 2, 4):
        computed = [9, 40, 1, 22, 63][:rows]
        told = make.rows([query_len] * rows, computed, groups, is_prefilling=[False] * rows)
        batch = buffers.stage(told, BatchShape(rows, rows * query_len, 5, 5 * query_len, query_len))
        meta, plans = builder.build(batch, 0), wrapper.num_plans
        theirs = [side.clone() for side in cache]
        out = backend.attend(q, k, v, cache, meta, 0.3, window)
        expected = reference.attend(q, k, v, theirs, reference.builder().build(batch, 0), 0.3, window)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert made == [wrapper], "the layers of a captured shape share its plan"
        assert wrapper.num_plans == plans
    assert builder.addresses() == book
    assert backend.builder().addresses() == {}


def test_groups_have_plans_of_their_own(make: Any, made: list[Double]) -> None:
    groups = (KVCacheGroup(4, 18), KVCacheGroup(4, 18))
    buffers = InputBuffers(BatchLimits(3, 9, 70), groups, "cpu")
    rows = make.rows([1, 1], [9, 30], groups)
    batch = buffers.stage(rows, BatchShape.of(2, 2, 1))
    backend = FlashInferBackend()
    q = torch.randn(2, 2, 8)
    for group in (0, 1):
        meta = backend.builder().build(batch, group)
        backend.attend(q, q, q, make.cache(99, 4, 2, 8, torch.float32), meta, 1.0)
    tables = [table[row, : 3 if row == 0 else 8] for table in rows.block_tables for row in (0, 1)]
    assert made[0].indices.tolist() == [*tables[0], *tables[1]]
    assert made[1].indices.tolist() == [*tables[2], *tables[3]]


def test_a_batch_without_rows_plans_nothing(make: Any, made: list[Double]) -> None:
    buffers = InputBuffers(BatchLimits(4, 4, 70), (KVCacheGroup(4, 18),), "cpu")
    backend = FlashInferBackend()
    meta = backend.builder().build(buffers.dummy(BatchShape(0, 0, 4, 4, 1)), 0)
    q = torch.ones(4, 2, 8)
    assert (backend.attend(q, q, q, make.cache(2, 4, 2, 8, torch.float32), meta, 1.0) == 0).all()
    assert made == []


def test_inexact_lengths_are_refused(make: Any) -> None:
    groups = (KVCacheGroup(4, 18),)
    buffers = InputBuffers(BatchLimits(4, 4, 70), groups, "cpu")
    rows = dataclasses.replace(make.rows([1, 1], [9, 30], groups), num_computed_is_exact=np.array([True, False]))
    batch = buffers.stage(rows, BatchShape.of(2, 2, 1))
    with pytest.raises(InexactBound, match="FlashInfer plans on the host, from exact lengths; rows: row 1 has only"):
        FlashInferBackend().builder().build(batch, 0)


def test_pages() -> None:
    starts, last = page_indptr_and_last_lens(np.array([1, 4, 5, 8, 9], np.int32), 4)
    assert starts.tolist() == [0, 1, 2, 4, 6, 9]
    assert last.tolist() == [1, 4, 1, 4, 1]
    table = torch.arange(20, dtype=torch.int32).view(5, 4)
    pages = page_indices(table, starts)
    assert pages.tolist() == [0, 4, 8, 9, 12, 13, 16, 17, 18]
    assert pages.dtype is torch.int32


def test_the_builder_declares_what_it_reads() -> None:
    builder = FlashInferBackend().builder()
    check_reads(builder)
    assert builder.graph_support is GraphSupport.UNIFORM
    assert {"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact", "query_start_loc_cpu"} <= builder.reads


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "flashinfer: device cpu is not CUDA"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of torch.float16, torch.bfloat16"),
        ({"head_dim": 80}, "head_dim 80 is not one of 64, 128, 256"),
        ({"sliding_window": 0}, "sliding_window 0 is not positive"),
        ({"capability": (7, 5)}, "compute capability 7.5 is below 8.0"),
        ({"available": False}, "there is no CUDA device"),
    ],
)
def test_why_not(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
    changes = dict(changes)
    capability, available = changes.pop("capability", (9, 0)), changes.pop("available", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert get_backend("flashinfer", **options).name == "flashinfer" if available and capability > (8, 0) else True
    with pytest.raises(ValueError, match=message):
        get_backend("flashinfer", **(options | changes))


@pytest.mark.usefixtures("made")
def test_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert get_backend("flashinfer", device="cuda", dtype=torch.float16, head_dim=128).name == "flashinfer"


def test_why_not_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bateleur.metadata.backends.flashinfer.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="flashinfer is not installed; bateleur-metadata"):
        get_backend("flashinfer", device="cuda", dtype=torch.bfloat16, head_dim=64)


def test_bad_calls(make: Any) -> None:
    backend = FlashInferBackend()
    batch, tensors, cache = _step(make, "decode", 5, (2, 2))
    with pytest.raises(ValueError, match="meta: is PagedAttentionMetadata, must be the FlashInferMetadata"):
        backend.attend(*tensors, cache, ReferenceBackend().builder().build(batch, 0), 1.0)
    meta = backend.builder().build(batch, 0)
    with pytest.raises(ValueError, match="rotary: the backend 'flashinfer' does not fuse it"):
        backend.attend(*tensors, cache, meta, 1.0, None, (tensors[0], tensors[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", list(BATCHES))
def test_gpu_equals_the_torch_backend(make: Any, name: str, window: int | None) -> None:
    pytest.importorskip("flashinfer", reason="needs the extra flashinfer")
    results = []
    for backend in ("flashinfer", "torch"):
        batch, tensors, cache = _step(make, name, 16, (8, 2), dim=64, dtype=torch.bfloat16, device="cuda", padding=0)
        chosen = get_backend(backend, device="cuda", dtype=torch.bfloat16, head_dim=64)
        results.append(chosen.attend(*tensors, cache, chosen.builder().build(batch, 0), 0.125, window))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
