"""The torch backend against the reference, with NaN in all memory that must not be read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, get_backend, native
from bateleur.metadata.backends import _native_ops, _torch_ops, backend_names
from bateleur.metadata.backends.reference import paged_attention_reference


def _runs_here(name: str) -> bool:
    """Return whether a backend supports float32 on a CPU."""
    try:
        get_backend(name, device="cpu", dtype=torch.float32, head_dim=16)
    except ValueError:
        return False
    return True


ON_CPU = [name for name in backend_names() if _runs_here(name)]

# query lengths and computed tokens: decodes first, then chunks over long contexts, then fresh prompts
BATCHES = {
    "decode": ([1, 1, 1], [0, 61, 17]),
    "one": ([1], [33]),
    "prefill": ([13, 2, 29], [0, 0, 0]),
    "chunked": ([5, 17, 3], [44, 11, 60]),
    "mixed": ([1, 1, 1, 7, 1, 19], [9, 40, 0, 50, 12, 0]),
}


def _world(make: Any, name: str, block_size: int, *, padding: bool = False, fill: int = 0) -> Any:
    query_lens, computed = BATCHES[name]
    groups = (KVCacheGroup(block_size, -(-70 // block_size)),)
    buffers = InputBuffers(BatchLimits(9, 70, 70), groups, "cpu", seq_len_fill=fill)
    buffers.poison()
    rows = make.rows(query_lens, computed, groups)
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    padded = (num_reqs + 3, num_tokens + 5) if padding else (num_reqs, num_tokens)
    promise = max(query_lens) if max(query_lens) == 1 else max(query_lens) + 4
    return buffers.stage(rows, BatchShape(num_reqs, num_tokens, *padded, promise), max_seq_len=70)


def _attend(
    make: Any, name: str, batch: Any, heads: tuple[int, int], dim: int, dtype: torch.dtype, **options: Any
) -> Any:
    """Fill the context of every row, then run one step. Inputs depend on the real sizes only."""
    window = options.get("window")
    backend = get_backend(name, device="cpu", dtype=dtype, head_dim=dim)
    meta = dataclasses.replace(backend.builder().build(batch, 0), **options.get("meta", {}))
    block_size = {-(-70 // size): size for size in (4, 5, 16)}[batch.block_tables[0].shape[1]]
    cache = make.cache(int(batch.block_tables[0].max()) + 1, block_size, heads[1], dim, dtype)
    generator = torch.Generator().manual_seed(0)
    for row, computed in enumerate(batch.num_computed_tokens.tolist()):
        positions = torch.arange(computed)
        blocks = batch.block_tables[0][row][positions // block_size].long()
        for side in cache:
            new = torch.randn(computed, heads[1], dim, generator=generator)
            side[blocks, positions % block_size] = new.to(dtype)
    real = batch.num_actual_tokens
    tensors = []
    for count in (heads[0], heads[1], heads[1]):
        tensor = torch.full((batch.num_tokens, count, dim), float("nan"), dtype=dtype)
        tensor[:real] = torch.randn(real, count, dim, generator=generator)
        tensors.append(tensor)
    out = backend.attend(*tensors, cache, meta, dim**-0.5, window)
    return out, cache


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_queries_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Decoding one token gives the same result as verifying the last two tokens together."""
    rows, computed, blocks = 3, torch.tensor([70, 17, 1]), 5
    generator = torch.Generator().manual_seed(0)
    cache = tuple(torch.randn(blocks * rows + 1, 16, 2, 24, generator=generator).to(dtype) for _ in range(2))
    table = torch.arange(1, blocks * rows + 1, dtype=torch.int32).view(rows, blocks)
    q = torch.randn(rows, 2, 4, 24, generator=generator).to(dtype)

    def attend(q: torch.Tensor, last: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
        starts = torch.arange(0, tokens * len(last) + 1, tokens, dtype=torch.int32)
        lengths, decodes = last.int(), len(last) if tokens == 1 else 0
        return _native_ops.paged_attention(q, *cache, table, lengths, starts, decodes, tokens, 80, 0.2, 0)

    together = attend(q.flatten(0, 1), computed + 2, table, 2).view(q.shape)
    for place in range(2):
        assert torch.equal(attend(q[:, place], computed + 1 + place, table, 1), together[:, place])
        for row in range(rows):
            alone = attend(q[row, place][None], computed[row : row + 1] + 1 + place, table[row : row + 1], 1)
            assert torch.equal(alone[0], together[row, place])


@pytest.mark.parametrize("window", [None, 1, 6, 500])
@pytest.mark.parametrize("block_size", [4, 5, 16])
@pytest.mark.parametrize(("heads", "dim"), [((3, 1), 17), ((3, 3), 80), ((6, 2), 48), ((4, 2), 16)])
@pytest.mark.parametrize("name", list(BATCHES))
def test_torch_form_equals_the_reference(
    make: Any, name: str, heads: tuple[int, int], dim: int, block_size: int, window: int | None
) -> None:
    batch = _world(make, name, block_size)
    expected, expected_cache = _attend(make, "reference", batch, heads, dim, torch.float64, window=window)
    out, cache = _attend(make, "torch", batch, heads, dim, torch.float64, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for side, other in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(side, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_torch_form_in_every_dtype(make: Any, name: str, dtype: torch.dtype, tolerance: float) -> None:
    batch = _world(make, name, 5)
    expected, _ = _attend(make, "reference", batch, (6, 2), 24, dtype)
    out, _ = _attend(make, "torch", batch, (6, 2), 24, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", list(BATCHES))
def test_T_A4_real_rows_invariant_under_padding(make: Any, name: str, backend: str, fill: int) -> None:
    """Padded tokens carry NaN queries, keys and values; free blocks and the null block hold NaN too."""
    expected, _ = _attend(make, backend, _world(make, name, 5), (3, 1), 17, torch.float32)
    batch = _world(make, name, 5, padding=True, fill=fill)
    out, cache = _attend(make, backend, batch, (3, 1), 17, torch.float32)
    torch.testing.assert_close(out[: batch.num_actual_tokens], expected, rtol=1e-6, atol=1e-6)
    assert (out[batch.num_actual_tokens :] == 0).all()
    assert all((side[0, 0] == 0).all() for side in cache)
    assert all(side[0, 1:].isnan().all() for side in cache), "the null block beyond slot 0 was written"


def test_T_A4_recycled_tails_and_freed_window_blocks_leak_nowhere(make: Any) -> None:
    """A table whose tail has blocks of other rows, and whose blocks before the window are null."""
    batch = _world(make, "mixed", 5)
    for window in (None, 6):
        expected, _ = _attend(make, "torch", batch, (3, 1), 17, torch.float32, window=window)
        table = batch.block_tables[0].clone()
        lengths, starts = batch.seq_lens, batch.query_start_loc
        stale = torch.arange(table.shape[1])[None] * 5 >= lengths[:, None]
        table[stale] = table.max()
        if window:
            first = lengths - starts.diff() - window + 1  # oldest key of the row's first query
            table[(torch.arange(table.shape[1])[None] + 1) * 5 <= first[:, None]] = 0
        meta = {"block_table": table}
        out, _ = _attend(make, "torch", batch, (3, 1), 17, torch.float32, window=window, meta=meta)
        assert torch.equal(out, expected)


def test_rows_without_keys_give_zero(make: Any) -> None:
    buffers = InputBuffers(BatchLimits(4, 4, 70), (KVCacheGroup(5, 14),), "cpu")
    batch = buffers.dummy(BatchShape(0, 0, 4, 4, 1), max_seq_len=70)
    for name in ON_CPU:
        out, _ = _attend(make, name, batch, (3, 1), 8, torch.float32)
        assert (out == 0).all()
    empty = buffers.dummy(BatchShape(0, 0, 4, 4, 1))
    assert (_attend(make, "torch", empty, (3, 1), 8, torch.float32)[0] == 0).all()


@pytest.mark.parametrize("limit", [1, 70, 400])
def test_prefill_tiles_do_not_change_the_result(make: Any, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    batch = _world(make, "mixed", 4, padding=True)
    expected, _ = _attend(make, "torch", batch, (6, 2), 24, torch.float64, window=9)
    monkeypatch.setattr(_torch_ops, "_MAX_TILE_SCORES", limit)
    out, _ = _attend(make, "torch", batch, (6, 2), 24, torch.float64, window=9)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_the_reference_is_plain_attention() -> None:
    """Compare with plain causal softmax, for one row with contiguous blocks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 7, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    cache = [torch.zeros(4, 3, 2, 7, dtype=torch.float64) for _ in range(2)]
    cache[0][1:] = k.view(3, 3, 2, 7)
    cache[1][1:] = v.view(3, 3, 2, 7)
    out = paged_attention_reference(
        q, *cache, torch.tensor([[1, 2, 3]]), torch.tensor([9]), torch.tensor([0, 9]), scale=0.3
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_operators_refuse_sizes_that_do_not_fit(make: Any) -> None:
    batch = _world(make, "mixed", 5)
    for meta, message in (
        ({"max_seq_len": 71}, "max_seq_len: 71 is above the 70 tokens"),
        ({"num_decodes": 7}, "num_decodes: 7 must be within 6 rows"),
        ({"slot_mapping": batch.slot_mappings[0][:-1]}, "slot_mapping: has 29 slots for keys"),
    ):
        with pytest.raises(ValueError, match=message):
            _attend(make, "torch", batch, (3, 1), 8, torch.float32, meta=meta)
    with pytest.raises(ValueError, match="q: 3 heads are no multiple of the cache's 2"):
        _attend(make, "torch", batch, (3, 2), 8, torch.float32)


def test_registry_says_why_not() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "head_dim": 64}
    assert get_backend(**options).name == ("torch" if native.unavailable_reason() else "native")
    assert [get_backend(name, **options).name for name in ON_CPU] == ON_CPU
    assert {"torch", "reference"} <= set(ON_CPU)
    for changes, message in (
        ({"name": "flash"}, "name='flash': unknown attention backend; use auto, torch, native, reference,"),
        ({"dtype": torch.int8}, "no backend for 'auto'; native: dtype torch.int8 is not one of"),
        ({"device": "meta"}, "device meta is neither CPU nor CUDA"),
        ({"head_dim": 0}, "head_dim 0 is not positive"),
        ({"sliding_window": 0}, "sliding_window 0 is not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            get_backend(**(options | changes))
