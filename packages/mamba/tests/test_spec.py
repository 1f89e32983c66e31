"""Sizes of states, the rules of a layout, and the pool."""

from __future__ import annotations

import pytest
import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaSpec, StatePool

MODELS = {  # layers, heads, head_dim, groups, MiB without drafts, MiB with 5; the state size is 128 in all
    "Nemotron-H-8B": (24, 128, 64, 8, 97, 599),
    "Nemotron-Nano-9B-v2": (27, 128, 80, 8, 137, 840),
    "Nemotron-3-Nano-4B": (21, 96, 80, 8, 80, 491),
    "Nemotron-3-Nano-30B-A3B": (23, 64, 64, 8, 47, 289),
    "Nemotron-3-Super-120B-A12B": (40, 128, 64, 8, 162, 998),
    "Nemotron-3-Ultra-550B-A55B": (48, 256, 64, 8, 389, 2385),
    "Bamba-9B": (29, 128, 64, 1, 117, 718),
    "Granite-4.0-H-350M": (28, 48, 32, 1, 21, 131),
    "Granite-4.0-H-Tiny": (36, 48, 64, 1, 55, 335),
    "Granite-4.0-H-Micro": (36, 64, 64, 1, 73, 446),
    "Granite-4.0-H-Small": (36, 128, 64, 1, 146, 892),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_request_of_published_models(name):
    layers, heads, head_dim, groups, *want = MODELS[name]
    for drafts, mebibytes in zip((0, 5), want, strict=True):
        spec = MambaSpec(heads, head_dim, 128, groups, num_speculative_tokens=drafts)
        used = layers * spec.max_memory_usage_bytes(MambaCacheMode.NONE)
        assert int(used / 2**20 + 0.5) == mebibytes


def test_shapes():
    spec = MambaSpec(6, 5, 7, 3, conv_width=3, num_speculative_tokens=2, ssm_dtype=torch.float16)
    assert (spec.inner_size, spec.conv_dim) == (30, 72)
    assert (spec.conv_shape, spec.ssm_shape) == ((4, 72), (6, 5, 7))
    assert spec.page_bytes == 4 * 72 * 2 + 6 * 5 * 7 * 2
    assert spec.num_speculative_blocks == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"state_size": -1}, "state_size is -1"),
        ({"num_groups": 3}, "num_heads is 4; it must be a multiple of num_groups = 3"),
        ({"conv_width": 1}, "conv_width is 1; it must be at least 2"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"ssm_dtype": torch.int8}, r"ssm_dtype is torch\.int8"),
    ],
)
def test_bad_specs_are_refused(change, message):
    sizes = {"num_heads": 4, "head_dim": 2, "state_size": 2, "num_groups": 2}
    with pytest.raises(ValueError, match=message):
        MambaSpec(**(sizes | change))


def test_layout_names_the_broken_rule():
    layout = CacheLayout(MambaCacheMode.NONE, 64, 3, 64)
    assert (layout.columns(), layout.slots_per_request()) == (4, 4)
    with pytest.raises(
        ValueError, match="block_size is 16; in cache mode 'none' it must equal max_model_len = 64"
    ):
        CacheLayout(MambaCacheMode.NONE, 16, 0, 64)
    with pytest.raises(ValueError, match="num_speculative_tokens is -1"):
        CacheLayout(MambaCacheMode.NONE, 64, -1, 64)


def test_pool():
    specs = [MambaSpec(2, 3, 4, 1), MambaSpec(4, 3, 4, 2, conv_dtype=torch.float32, num_speculative_tokens=1)]
    pool = StatePool(specs, 5, "cpu")
    conv, ssm = pool.layer(1)
    assert conv.shape == (5, 4, 28)
    assert (conv.dtype, ssm.dtype) == (torch.float32, torch.float32)
    assert ssm.shape == (5, 4, 3, 4)
    assert pool.nbytes == sum(t.nbytes for i in range(2) for t in pool.layer(i))
    assert pool.layer(0)[1].data_ptr() == pool.layer(0)[1].data_ptr()
    with pytest.raises(ValueError, match="num_slots is 1"):
        StatePool(specs, 1, "cpu")
    with pytest.raises(ValueError, match="specs is empty"):
        StatePool([], 4, "cpu")
