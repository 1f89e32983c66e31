"""The Triton backend: unsupported configurations, and the torch implementations of its operators on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bateleur.metadata import get_backend, native
from bateleur.metadata.backends._launch_config import MAX_SHORT_QUERY_LEN, launches_of, split_limit, work_shape
from bateleur.metadata.backends.paged import TorchBackend, TritonBackend

OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64}


@pytest.mark.parametrize("norm", ["", "head", "whole"])
@pytest.mark.parametrize("rotary_dim", [None, 10, 24])
def test_on_cpu_the_operators_run_their_torch_forms(mixed: Any, rotary_dim: int | None, norm: str) -> None:
    """Equal to the torch backend on normalised and rotated inputs; queries are overwritten, keys are not."""
    generator = torch.Generator().manual_seed(0)
    tokens = mixed.num_tokens
    projection = torch.randn(tokens, 8, 24, generator=generator)
    q, k, v = projection.split([4, 2, 2], 1)
    blocks = int(mixed.block_tables[0].max()) + 1
    caches = torch.zeros(2, 2, blocks, 5, 2, 24)
    caches[:, :, 1:] = torch.randn(2, blocks - 1, 5, 2, 24, generator=generator)
    rotary, weights, turned_q, turned_k = None, None, q.clone(), k.clone()
    if norm:
        dims = (1, 2) if norm == "whole" else (2,)
        made = [torch.rand(x.shape[dims[0] :], generator=generator) for x in (q, k)]
        weights = made[0].flatten(), made[1].flatten(), 1e-3
        for x, weight in zip((turned_q, turned_k), made, strict=True):
            x *= (x.square().mean(dims, keepdim=True) + 1e-3).rsqrt() * weight
    if rotary_dim:
        table = torch.randn(tokens, 1, 2 * rotary_dim, generator=generator)
        rotary = table[..., :rotary_dim], table[..., rotary_dim:]
        for x in (turned_q, turned_k):
            part = x[..., :rotary_dim].clone()
            x[..., :rotary_dim] = part * rotary[0] + part.roll(rotary_dim // 2, -1) * rotary[1]
    meta = TritonBackend().builder().build(mixed, 0)
    expected = TorchBackend().attend(turned_q, turned_k, v, tuple(caches[0]), meta, 0.2, 7)
    before = k.clone()
    out = TritonBackend().attend(q, k, v, tuple(caches[1]), meta, 0.2, 7, rotary, weights)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(caches[1], caches[0])
    torch.testing.assert_close(q, turned_q)
    assert torch.equal(k, before)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from bateleur.metadata import ops

    projection = torch.empty(6, 8, 24, device="meta")
    q, k, v = projection.split([4, 2, 2], 1)
    cache, ints = torch.empty(3, 5, 2, 24, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    assert ops.rotate_and_write_kv(q, k, v, cache, cache, ints, None, None) is None
    for attention, work in ((ops.paged_attention, ()), (ops.triton_paged_attention, (ints,))):
        out = attention(q, cache, cache, ints[:, None], ints, ints, 0, 6, 9, 0.2, 0, *work)
        assert out.shape == q.shape
        assert out.is_contiguous()


def test_operators_declare_what_they_write() -> None:
    from bateleur.metadata import ops

    written = {arg.name for arg in ops.rotate_and_write_kv._schema.arguments if arg.is_write}
    assert written == {"q", "k_cache", "v_cache"}
    for operator in (ops.attention_work, ops.triton_paged_attention):
        assert not [arg.name for arg in operator._schema.arguments if arg.is_write]


def test_the_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert get_backend("triton", device=cuda, **OPTIONS).name == "triton"
    for changes, message in (
        ({"device": "cpu"}, "triton: device cpu is not CUDA"),
        ({"dtype": torch.float64}, "triton: dtype torch.float64 is not one of torch.float16"),
        ({"head_dim": 257}, "triton: head_dim 257 is above 256"),
        ({"head_dim": 0}, "triton: head_dim 0 is not positive"),
        ({"sliding_window": 0}, "triton: sliding_window 0 is not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            get_backend("triton", **({"device": cuda} | OPTIONS | changes))
    for name, value, message in (
        ("bateleur.metadata.backends.paged.find_spec", lambda name: None, "triton is not installed"),
        ("torch.cuda.get_device_capability", lambda device: (7, 5), "compute capability 7.5 is below 8.0"),
        ("torch.cuda.is_available", lambda: False, "there is no CUDA device"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            with pytest.raises(ValueError, match=message):
                get_backend("triton", device=cuda, **OPTIONS)


def test_auto_prefers_the_kernels_on_cuda_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: None)
    assert get_backend(device="cpu", **OPTIONS).name == "native"
    monkeypatch.setattr(native, "unavailable_reason", lambda: "there is no gcc")
    assert get_backend(device="cpu", **OPTIONS).name == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert get_backend(device="cuda", **OPTIONS).name == "triton"
    assert get_backend(device="cuda", **OPTIONS | {"head_dim": 512}).name == "torch"
    with pytest.raises(ValueError, match=r"triton: dtype torch.int8 .*; torch: dtype torch.int8"):
        get_backend(device="cuda", **OPTIONS | {"dtype": torch.int8})


def test_triton_loads_with_the_first_call_on_cuda(fresh: Callable[[str], str]) -> None:
    code = (
        "import sys, torch\nfrom bateleur.metadata import get_backend, ops\n"
        "from bateleur.metadata.backends.paged import TritonBackend\nTritonBackend().builder()\n"
        "print('triton' in sys.modules)"
    )
    assert fresh(code) == "False\n"


def test_the_splits_of_all_rows_together_fill_the_device() -> None:
    assert split_limit(8, 132) * 8 == 2 * 132
    assert split_limit(1, 132) == 2 * 132
    assert split_limit(999, 132) == 1


def test_which_launches_a_batch_takes() -> None:
    assert launches_of(1, 4) == [(1, 0, 4)]
    assert launches_of(5, 16) == [(1, 0, 80)], "drafts of wide groups: one tile, split"
    assert launches_of(MAX_SHORT_QUERY_LEN + 1, 4) == [
        (1, MAX_SHORT_QUERY_LEN, 64),
        (MAX_SHORT_QUERY_LEN + 1, 0, 128),
    ], "decodes apart from prompts"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 16])
def test_drafts_take_as_many_keys_an_iteration_as_a_decode(group: int, head_dim: int) -> None:
    """However many lines they fill: the keys of an iteration are the order of a token's sums."""
    cache = torch.empty(2, 16, 2, head_dim, dtype=torch.bfloat16)
    keys = {}
    for length in (1, 5, MAX_SHORT_QUERY_LEN, MAX_SHORT_QUERY_LEN + 1):
        keys[length] = work_shape(2 * group, cache, 3, 3 * length, length, 0).launches[0].options["BLOCK_N"]
    assert len(set(keys.values())) == 1, keys


@pytest.mark.parametrize("max_query_len", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 7])
def test_a_list_is_made_once_for_the_layers_of_a_kind(mixed: Any, max_query_len: int, window: int | None) -> None:
    """The list size depends on rows, tokens and bounds."""
    backend, cache = TritonBackend(), torch.empty(9, 5, 2, 24)
    meta = replace(backend.builder().build(mixed, 0), max_query_len=max_query_len)
    work = backend.build_work_list(meta, (cache, cache), 6, window)
    shape = work_shape(6, cache, mixed.num_reqs, mixed.num_tokens, max_query_len, window or 0)
    assert work.shape == (shape.num_entries, 8)
    assert work.dtype == torch.int32
    assert (shape.group, shape.num_kv_heads, shape.window) == (3, 2, window or 0)
    assert TorchBackend().build_work_list(meta, (cache, cache), 6, window) is None
