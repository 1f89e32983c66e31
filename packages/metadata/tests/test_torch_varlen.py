"""Calls of torch's varlen attention, checked with a double on a CPU; results on a GPU that has a kernel."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, get_backend
from bateleur.metadata.attention_metadata_builder import GraphSupport
from bateleur.metadata.backends import torch_varlen
from bateleur.metadata.backends.base import LayerConfig
from bateleur.metadata.backends.reference import ReferenceBackend, paged_attention_reference
from bateleur.metadata.backends.torch_varlen import TorchVarlenBackend

BATCHES = {
    "decode": ([1, 1, 1], [0, 61, 17]),
    "prefill": ([13, 2, 29], [0, 0, 0]),
    "mixed": ([1, 1, 1, 7, 1, 19], [9, 40, 0, 50, 12, 0]),
}


def _double(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> None:
    """Double per torch's documentation: causal, aligned to the last key; padded tokens are not written."""
    assert cu_seq_k is None
    assert enable_gqa
    assert window_size[1] == 0
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    assert {each.dtype for each in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    window = window_size[0] + 1 if window_size[0] >= 0 else 0
    result = paged_attention_reference(
        query, key, value, block_table, seqused_k, cu_seq_q, scale, sliding_window=window
    )
    total = int(cu_seq_q[-1])
    out[:total] = result[:total]


def test_the_double_has_torchs_signature() -> None:
    """Reads the signature from the source, because the import takes seconds."""
    spec = importlib.util.find_spec("torch.nn.attention.varlen")
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    if "varlen_attn_out" not in functions:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn_out")
    theirs = functions["varlen_attn_out"]
    ours = inspect.signature(_double).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [each.arg for each in theirs.args]
    assert {p.name for p in ours if p.kind is p.KEYWORD_ONLY} <= {each.arg for each in theirs.kwonlyargs}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "_kernel", lambda: _double)


def _step(
    make: Any, name: str, device: str, block_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return a padded batch, its queries, keys and values, and a finite cache with every context."""
    query_lens, computed = BATCHES[name]
    groups = (KVCacheGroup(block_size, -(-70 // block_size)),)
    buffers = InputBuffers(BatchLimits(9, 70, 70), groups, device)
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    shape = BatchShape(num_reqs, num_tokens, num_reqs + 2, num_tokens + 5, max(query_lens))
    batch = buffers.stage(make.rows(query_lens, computed, groups), shape)
    generator = torch.Generator().manual_seed(0)
    blocks = 1 + num_reqs * groups[0].max_blocks

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    tensors = tuple(random(batch.num_tokens, count, dim) for count in (heads[0], heads[1], heads[1]))
    cache = random(blocks, block_size, heads[1], dim), random(blocks, block_size, heads[1], dim)
    for side in cache:
        side[0] = 0
    return batch, tensors, cache


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("heads", [(3, 1), (6, 2)])
@pytest.mark.parametrize("name", list(BATCHES))
def test_the_call_means_what_the_reference_means(
    make: Any, name: str, heads: tuple[int, int], window: int | None
) -> None:
    results = []
    for backend in (TorchVarlenBackend(), ReferenceBackend()):
        batch, tensors, cache = _step(make, name, "cpu", 4, heads, 16, torch.float64)
        meta = backend.builder().build(batch, 0)
        out = backend.attend(*tensors, cache, meta, 0.3, window)
        results.append((out, *cache))
        assert (out[batch.num_actual_tokens :] == 0).all(), "padded tokens give 0"
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_a_batch_without_rows_calls_no_kernel(make: Any) -> None:
    buffers = InputBuffers(BatchLimits(4, 4, 70), (KVCacheGroup(4, 18),), "cpu")
    backend = TorchVarlenBackend()
    meta = backend.builder().build(buffers.dummy(BatchShape.of(0, 0, 1)), 0)
    empty = torch.empty(0, 2, 8)
    assert backend.attend(empty, empty, empty, make.cache(2, 4, 2, 8, torch.float32), meta, 1.0).shape == empty.shape


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    torch_varlen._probe.cache_clear()
    yield
    torch_varlen._probe.cache_clear()


def _probe(window: int | None = None) -> str | None:
    return torch_varlen._probe(LayerConfig(16, torch.float32, torch.device("cpu"), window), None)


@pytest.mark.usefixtures("fresh_probe")
def test_the_probe_finds_out_what_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignores_the_table(out: Tensor, *args: Any, block_table: Tensor, **options: Any) -> None:
        _double(out, *args, block_table=torch.zeros_like(block_table), **options)

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("constraints are not satisfied:\n  - cuDNN >= 9.18 is required\n")

    monkeypatch.setattr(torch_varlen, "_kernel", lambda: _double)
    assert _probe() is None
    assert _probe(window=2) is None
    torch_varlen._probe.cache_clear()
    monkeypatch.setattr(torch_varlen, "_kernel", lambda: ignores_the_table)
    assert str(_probe()).endswith("does not follow block tables here")
    torch_varlen._probe.cache_clear()
    monkeypatch.setattr(torch_varlen, "_kernel", lambda: refuses)
    assert str(_probe()).endswith("here: constraints are not satisfied:; cuDNN >= 9.18 is required")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "torch_varlen: device cpu is not CUDA"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of torch.float16, torch.bfloat16"),
        ({"head_dim": 20}, "head_dim 20 is not a multiple of 8 up to 256"),
        ({"head_dim": 264}, "head_dim 264 is not"),
        ({"sliding_window": 0}, "sliding_window 0 is not positive"),
    ],
)
def test_why_not(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
    with pytest.raises(ValueError, match=message):
        get_backend("torch_varlen", **(options | changes))


def test_why_not_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device"):
        get_backend("torch_varlen", **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_varlen, "_kernel", lambda: None)
    with pytest.raises(ValueError, match="has no varlen_attn_out with a block table"):
        get_backend("torch_varlen", **options)


@pytest.mark.usefixtures("double")
def test_bad_calls(make: Any) -> None:
    backend = TorchVarlenBackend()
    assert backend.builder().graph_support is GraphSupport.UNIFORM
    batch, tensors, cache = _step(make, "decode", "cpu", 5, (2, 2), 8, torch.float32)
    meta = backend.builder().build(batch, 0)
    with pytest.raises(ValueError, match="kv: has blocks of 5 tokens; cuDNN needs a power of two"):
        backend.attend(*tensors, cache, meta, 1.0)
    with pytest.raises(ValueError, match="rotary: the backend 'torch_varlen' does not fuse it"):
        backend.attend(*tensors, cache, meta, 1.0, None, (tensors[0], tensors[0]))
    with pytest.raises(ValueError, match="norm: the backend 'torch_varlen' does not fuse it"):
        backend.attend(*tensors, cache, meta, 1.0, None, None, (tensors[0], tensors[0], 1e-6))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", list(BATCHES))
def test_gpu_equals_the_torch_backend(make: Any, name: str, window: int | None) -> None:
    reason = TorchVarlenBackend().unsupported_reason(LayerConfig(64, torch.bfloat16, torch.device("cuda"), window))
    if reason is not None:
        pytest.skip(reason)
    results = []
    for backend in ("torch_varlen", "torch"):
        batch, tensors, cache = _step(make, name, "cuda", 16, (6, 2), 64, torch.bfloat16)
        chosen = get_backend(backend, device="cuda", dtype=torch.bfloat16, head_dim=64, sliding_window=window)
        results.append(chosen.attend(*tensors, cache, chosen.builder().build(batch, 0), 0.125, window))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
